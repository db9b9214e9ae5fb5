"""The pane says where every word comes from, with colours and without."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from ssd_jax.engine.origin import Origin, TextSpan
from ssd_jax.tools.demo.pane import AnswerPane, round_line

TARGET, DRAFT, BRANCH, BACKUP = Origin
ROUNDS = [
    [TextSpan("The", TARGET)],
    [TextSpan(" four", BRANCH), TextSpan(" seasons", BRANCH), TextSpan(" of", TARGET)],
    [TextSpan(" the", BACKUP), TextSpan(" year\n", TARGET)],
]


def shown(width=80, *, terminal=False, no_color=False, title="Why?", rounds=ROUNDS):
    file = io.StringIO()
    colours = "truecolor" if terminal else None
    console = Console(
        width=width,
        file=file,
        force_terminal=terminal,
        color_system=colours,
        no_color=no_color,
        legacy_windows=False,
    )
    with AnswerPane(console, title) as pane:
        for spans in rounds:
            pane.add(spans)
    return file.getvalue()


def test_in_a_pipe_words_are_marked_by_origin_and_the_legend_says_how():
    lines = shown().splitlines()
    assert lines[0].startswith("╭─ > Why? ──")
    assert lines[1].strip("│ ") == "The «four seasons» of ‹the› year"
    assert lines[-1] == "tokens:   target's own 3   «prepared branch» 2   ‹drafted after a miss› 1"
    assert all(len(line) <= 80 for line in lines)


def test_on_a_terminal_words_are_coloured():
    out = shown(terminal=True)
    assert "\x1b[32m four seasons\x1b[0m" in out
    assert "\x1b[35m the\x1b[0m" in out
    assert "«" not in out


def test_without_colours_a_terminal_shows_marks_too():
    assert "«four seasons»" in shown(terminal=True, no_color=True)


@pytest.mark.parametrize("width", [20, 40, 80, 120])
def test_a_long_answer_is_whole_at_any_width(width):
    words = [[TextSpan(f" word{n}", BRANCH if n % 2 else TARGET)] for n in range(40)]
    out = shown(width, title="a question of many words " * 9, rounds=words)
    for n in range(40):
        assert f"word{n}" in out
    assert max(map(len, out.splitlines())) <= width


def test_control_characters_are_not_sent_to_the_terminal():
    out = shown(title="\x1b[2J", rounds=[[TextSpan("a\x1b[31mb", TARGET)]])
    assert "\x1b" not in out


def test_the_line_about_rounds_counts_hits_among_outcomes_that_were_looked_up():
    assert round_line([3, 1, 2], 2, 1) == (
        "3 rounds of the target, 2.00 tokens a round; the draft had prepared for 2 of 3 outcomes"
    )
    assert "prepared" not in round_line([1, 2], 0, 0)
