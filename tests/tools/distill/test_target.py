"""A target is the same tomorrow and as a copy, and another one by what its tokenizer writes."""

import json

import pytest

from ssd_jax.checkpoints.tokenizers.hf import tokenizer_from_directory
from ssd_jax.testing import tiny
from ssd_jax.tools.distill.target import open_target

DATED = "{{ strftime_now('%d %b %Y') }}\r\n{{ messages[0].content }}"


@pytest.fixture
def target(tmp_path):
    """A checkpoint whose chat template writes the date."""
    directory = tiny.write_checkpoint(tmp_path / "target")
    (directory / "chat_template.jinja").write_text(DATED, newline="")
    return directory


def digest(directory) -> str:
    return open_target(str(directory)).sha256


ANOTHER_DAY = """
import datetime

class Clock(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2025, 1, {day}, tzinfo=tz)

datetime.datetime = Clock
from ssd_jax.checkpoints.chat.template_child import main
main()
"""


def test_a_template_that_writes_the_date_is_the_same_on_another_day(target, monkeypatch, tmp_path):
    shown, digests = [], []
    for day in (1, 2):
        program = tmp_path / f"{day}.py"
        program.write_text(ANOTHER_DAY.format(day=day))
        monkeypatch.setattr("ssd_jax.checkpoints.chat.template._PROGRAM", program)
        opened = open_target(str(target))
        shown.append(
            opened.checkpoint.tokenizer.apply_chat_template(
                [{"role": "user", "content": "?"}], add_generation_prompt=True
            )
        )
        digests.append(opened.sha256)
    assert shown[0] != shown[1]
    assert digests[0] == digests[1]


def test_a_tokenizer_that_was_saved_again_is_the_same(target):
    before = digest(target)
    config = json.loads((target / "tokenizer_config.json").read_text())
    (target / "chat_template.jinja").unlink()
    (target / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": DATED}))
    assert digest(target) == before
    tokenizer_from_directory(target).save(target)
    assert digest(target) == before


def test_another_template_is_another_target(target):
    before = digest(target)
    (target / "chat_template.jinja").write_text(DATED + "!", newline="")
    assert digest(target) != before


@pytest.mark.parametrize("name", ["eos_token_id", "bos_token_id"])
def test_other_tokens_that_begin_or_end_a_text_are_another_target(target, name):
    before = digest(target)
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {name: 7}))
    assert digest(target) != before
