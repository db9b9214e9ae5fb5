"""Samples of output in README and docs: `docs/samples.py` renews them, by commands that parse."""

import importlib.util
import shlex
from itertools import groupby
from pathlib import Path

import pytest

from ssd_jax.cli.main import main

ROOT = Path(__file__).parent.parent
_SPEC = importlib.util.spec_from_file_location("samples", ROOT / "docs/samples.py")
assert _SPEC is not None
assert _SPEC.loader is not None
samples = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(samples)

PAGES = [
    page
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))
    if "<!-- sample:" in page.read_text(encoding="utf-8")
]


def ours(command):
    """The arguments of each `ssd-jax` in a line for bash."""
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for operator, group in groupby(words, lambda word: set(word) <= set("|&;<>")):
        found = list(group)
        if not operator and found[0] == "ssd-jax":
            yield [word for word in found[1:] if not word.isdecimal()]  # the 2 of 2>&1


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_samples_have_flags_that_there_are(page, capsys):
    text = page.read_text(encoding="utf-8")
    found = list(samples.SAMPLE.finditer(text))
    assert len(found) == text.count("<!-- sample:")
    for sample in found:
        commands = list(ours(sample["command"]))
        assert commands
        for command in commands:
            with pytest.raises(SystemExit) as ended:  # an unknown flag would not get so far
                main([*command, "--help"])
            assert ended.value.code == 0, capsys.readouterr().err


def test_a_sample_is_renewed_with_the_sentence_below_it():
    page = "a\n\n<!-- sample: printf 'x\\ny \\nz' | from ^y -->\n```\nold\n```\n\nb\n"
    once = samples.renew(page, "Made on Monday.")
    assert once.endswith("-->\n```\ny\nz\n```\n\nMade on Monday.\n\nb\n")
    again = samples.renew(once, "Made on Tuesday.")
    assert again == once.replace("Monday", "Tuesday")


def test_a_sample_whose_command_fails_stays(capsys):
    page = "<!-- sample: false | cat -->\n```\nold\n```\n"
    assert samples.renew(page, "Made on Monday.") == page
    assert "left as it was: false" in capsys.readouterr().err
