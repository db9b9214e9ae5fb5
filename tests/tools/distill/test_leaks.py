"""A training prompt that gives a held-out one away is found, and only such a one."""

import re

import numpy as np
import pytest

from ssd_jax.tools.distill import leaks as leaks_module
from ssd_jax.tools.distill import prompts
from ssd_jax.tools.distill.leaks import SPAN, HeldOut
from ssd_jax.tools.distill.reading import Line

HELD = list(range(100, 140))


def words(tokens):
    return " ".join(map(str, tokens))


def leaks(text, held=HELD):
    return HeldOut([held], words).leaks(text)


@pytest.mark.parametrize("begin", [0, 13, len(HELD) - SPAN])
def test_a_shared_span_leaks_wherever_it_is(begin):
    span = HELD[begin : begin + SPAN]
    for text in (span, [1, 2, *span], [*span, 3], [4, *span, 5]):
        assert leaks(text)


def test_a_shared_span_one_token_shorter_does_not_leak():
    assert not leaks([1, *HELD[: SPAN - 1], 2, *HELD[SPAN : 2 * SPAN - 1], 3])


def test_a_short_text_leaks_only_whole():
    assert leaks([1, 7, 8, 9, 2], held=[7, 8, 9])
    assert not leaks([1, 7, 8, 2], held=[7, 8, 9])
    assert not leaks([], held=[7, 8, 9])


class Pieces:
    """A token for each word with the space before it, and for marks that stand together."""

    def __init__(self):
        self._known = []

    def encode(self, text, **_about):
        pieces = re.findall(r" ?\w+|[^\w\s]+|\s", text)
        self._known += pieces
        return [self._known.index(piece) for piece in pieces]

    def decode(self, tokens):
        return "".join(self._known[token] for token in tokens)


@pytest.mark.parametrize("held", ["Why so?", " Why so?", "Is it so? " * 3 + "No"])
def test_a_short_prompt_is_found_among_whatever_text(held, monkeypatch):
    """Its first and its last token are others there."""
    pieces = Pieces()
    monkeypatch.setattr(
        prompts, "_encode", lambda line, tokenizer: tokenizer.encode(line.authored_text)
    )
    asked = prompts._candidate("held", 0, Line.from_text(held), pieces)
    assert len(asked.hidden[0]) <= SPAN
    check = HeldOut(asked.hidden, pieces.decode)
    for around in ("{}", "Tell me: {}", "{} I ask.", 'Say "{}" again.', "({})", "{}!", "{}\n"):
        assert check.leaks(pieces.encode(around.format(held.strip())))
    assert not check.leaks(pieces.encode("Tell me: Why not?"))


def test_a_word_is_not_found_inside_other_words():
    pieces = Pieces()
    for held in ("able", "ta", "le"):
        check = HeldOut([pieces.encode(held)], pieces.decode)
        assert not check.leaks(pieces.encode("The table."))
        assert check.leaks(pieces.encode(f"The {held}."))


def test_an_empty_text_gives_nothing_away():
    assert not leaks([1, 2, 3], held=[])


def test_tokens_are_compared_whole_not_as_bytes():
    # 256 in little-endian bytes holds a 1 at a place where no token begins.
    assert not leaks([256] * (SPAN + 2), held=[1] * (SPAN + 1))


def test_leaks_agree_with_a_comparison_of_every_span(monkeypatch):
    monkeypatch.setattr(leaks_module, "SPAN", 4)
    rng = np.random.default_rng(0)
    held = [rng.integers(0, 3, rng.integers(1, 30)).tolist() for _ in range(6)]
    check = HeldOut(held, words)

    def spans(text, length):
        return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}

    outcomes = []
    for _ in range(200):
        text = rng.integers(0, 3, rng.integers(0, 12)).tolist()
        expected = any(spans(text, n) & spans(h, n) for h in held for n in [min(4, len(h))])
        assert check.leaks(text) == expected
        outcomes.append(expected)
    assert len(set(outcomes)) == 2
