"""A training prompt that gives a held-out one away is found, and only such a one."""

import re

import numpy as np
import pytest

from ssd_jax.distill import prompts
from ssd_jax.distill.prompts import SPAN, HeldOut
from ssd_jax.distill.reading import Line

HELD = list(range(100, 140))


def leaks(text, held=HELD):
    return HeldOut([(held,)]).leaks(text)


@pytest.mark.parametrize("begin", [0, 13, len(HELD) - SPAN])
def test_a_shared_span_leaks_wherever_it_is(begin):
    span = HELD[begin : begin + SPAN]
    for text in (span, [1, 2, *span], [*span, 3], [4, *span, 5]):
        assert leaks(text)


def test_one_token_less_does_not():
    assert not leaks([1, *HELD[: SPAN - 1], 2, *HELD[SPAN : 2 * SPAN - 1], 3])


def test_a_short_text_leaks_only_whole():
    assert leaks([1, 7, 8, 9, 2], held=[7, 8, 9])
    assert not leaks([1, 7, 8, 2], held=[7, 8, 9])
    assert not leaks([], held=[7, 8, 9])


def test_a_text_of_just_a_span_is_also_compared_in_its_other_spelling():
    usual, after_space = list(range(SPAN)), [99, *range(1, SPAN)]
    held = HeldOut([(usual, after_space)])
    assert held.leaks([5, *usual])
    assert held.leaks([5, *after_space])


def test_a_prompt_is_found_behind_other_words(monkeypatch):
    """A word has another token behind a space than where a text begins with it."""

    class Words:
        """A token for each word, with the space before it."""

        def __init__(self):
            self._known = {}

        def encode(self, text, **_about):
            words = re.findall(r" ?\S+", text)
            return [self._known.setdefault(word, len(self._known)) for word in words]

    words = Words()
    monkeypatch.setattr(prompts, "_encode", lambda line, tokenizer: tokenizer.encode(line.own_text))
    asked = prompts._asked("held", 0, Line.of("Why so?"), words)
    held = HeldOut(asked.hidden)
    for text in ("Why so?", "Tell me: Why so?", "Why so? I ask."):
        assert held.leaks(words.encode(text))
    assert not held.leaks(words.encode("Tell me: Why not?"))


def test_an_empty_text_gives_nothing_away():
    assert not HeldOut([([],)]).leaks([1, 2, 3])


def test_tokens_are_compared_whole_not_as_bytes():
    # 256 in little-endian bytes holds a 1 at a place where no token begins.
    assert not leaks([256, 256], held=[1])


def test_it_agrees_with_comparing_every_span(monkeypatch):
    monkeypatch.setattr(prompts, "SPAN", 4)
    rng = np.random.default_rng(0)
    held = [rng.integers(0, 3, rng.integers(1, 30)).tolist() for _ in range(6)]
    check = HeldOut([(text,) for text in held])

    def spans(text, length):
        return {tuple(text[i : i + length]) for i in range(len(text) - length + 1)}

    outcomes = []
    for _ in range(200):
        text = rng.integers(0, 3, rng.integers(0, 12)).tolist()
        expected = any(spans(text, n) & spans(h, n) for h in held for n in [min(4, len(h))])
        assert check.leaks(text) == expected
        outcomes.append(expected)
    assert len(set(outcomes)) == 2
