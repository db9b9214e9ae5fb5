"""Stage magpie by the command: the target's turns become prompts, wherever a run is stopped."""

import json

import pytest

from ssd_jax.cli.main import main
from ssd_jax.testing import tiny
from tests.tools.distill import tiny_run
from tests.tools.distill.fake_target import FakeTarget

TURNS = 14
MAGPIE = {
    "magpie_completions": str(TURNS),
    "magpie_max_tokens": "16",
    "magpie_slots": "2",
    "magpie_shard_tokens": "80",
}
LETTER_A, SPACE = 64, 220
"""Ids of the tiny vocabulary."""


class Writer(FakeTarget):
    """Ends a turn as the template does, if it is asked for one."""

    def answer(self, ids, params, index):
        answer = super().answer(ids, params, index)
        if params.max_tokens != 16:
            return answer
        words = [LETTER_A + b % 26 if i % 3 else SPACE for i, b in enumerate(answer * 9)]
        return [*words[:15], *([tiny.END_OF_TURN] if index % 5 else [])]


def distill(place, target, out, *arguments, **changes) -> int:
    config = tiny_run.write_config(place, target, **MAGPIE | changes)
    given = [f"--config={config}", f"--out={out}", "--compile_cache=off"]
    return main(["distill", *given, *arguments])


def files(out):
    return {
        str(path.relative_to(out)): path.read_bytes() for path in out.rglob("*.*") if path.is_file()
    }


@pytest.fixture
def place(tmp_path):
    return tiny_run.write_data(tmp_path)


@pytest.fixture
def uninterrupted(place, tiny_checkpoint, monkeypatch, capsys):
    """Files of a run that nothing ended."""
    Writer().install(monkeypatch)
    assert distill(place, tiny_checkpoint, place / "whole") == 0
    stderr = capsys.readouterr().err
    assert f"magpie: {TURNS} turns of " in stderr
    return files(place / "whole")


def test_turns_become_prompts_and_are_completed(uninterrupted, place):
    counts = json.loads(uninterrupted["prompts/manifest.json"])["data"]["counts"]["train"]
    assert counts["magpie"]["broken"] == 3  # of 14 every fifth was cut off
    assert counts["magpie"]["kept"] >= 8
    manifest = json.loads(uninterrupted["magpie/manifest.json"])
    assert manifest["finished"]
    assert len(manifest["data"]["shards"]) > 2
    assert all(shard["scores"] is None for shard in manifest["data"]["shards"])


@pytest.mark.parametrize("patience", [0, 5, TURNS - 1, TURNS, TURNS + 4])
def test_a_run_that_is_stopped_anywhere_goes_on_to_the_same_files(
    uninterrupted, place, tiny_checkpoint, monkeypatch, patience
):
    out = place / "stopped"
    fake = Writer(patience=patience).install(monkeypatch)
    assert distill(place, tiny_checkpoint, out) == 130
    fake.patience = None
    assert distill(place, tiny_checkpoint, out) == 0
    assert files(out) == uninterrupted
    assert len(fake.answered) < TURNS + 12 + 5  # finished shards are not made again


def test_other_turns_are_refused_by_what_was_made_of_them(
    uninterrupted, place, tiny_checkpoint, monkeypatch, capsys
):
    Writer().install(monkeypatch)
    out = place / "whole"
    assert distill(place, tiny_checkpoint, out, magpie_seed="1") == 2
    assert "magpie.seed is 1, was 0" in capsys.readouterr().err
    (out / "magpie" / "manifest.json").unlink()
    assert distill(place, tiny_checkpoint, out, magpie_seed="1") == 2
    assert "the output of stage magpie has sha256" in capsys.readouterr().err


def test_prompts_wait_for_the_turns(place, tiny_checkpoint, capsys):
    assert distill(place, tiny_checkpoint, place / "out", "--stage=prompts") == 2
    assert "stage prompts needs stage magpie, which is not finished" in capsys.readouterr().err


def test_a_target_without_a_chat_template_is_refused_first(place, tmp_path, capsys):
    target = tiny.write_checkpoint(tmp_path / "bare")
    (target / "chat_template.jinja").unlink()
    assert distill(place, target, place / "out") == 2
    assert "[magpie] goes on from the user prefix of a chat template" in capsys.readouterr().err
    assert not [path for path in (place / "out").rglob("*") if path.name != ".lock"]
