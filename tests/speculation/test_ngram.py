"""Prompt lookup proposes what followed the longest, then latest, earlier match."""

import itertools

import numpy as np
import pytest

from ssd_jax.speculation import ngram
from ssd_jax.speculation.ngram import NgramIndex


def index_of(tokens) -> NgramIndex:
    index = NgramIndex()
    index.extend(tokens)
    return index


def slowly(tokens, count, *, longest=32):
    """The same in one line a rule: every earlier end, its match length, the best of them."""
    size = len(tokens)

    def matched(end):  # tokens before `end` that equal the tokens before the text's end
        return next((n for n in range(end) if tokens[end - 1 - n] != tokens[size - 1 - n]), end)

    candidates = [(min(matched(end), longest), end) for end in range(1, size)]
    length, end = max(candidates, default=(0, 0))
    if not length:
        return []
    text = list(tokens)
    for step in range(count):
        text.append(text[end + step])
    return text[size:]


def test_ngrams_propose_what_followed_the_same_words():
    assert index_of([1, 2, 3, 4, 5, 6, 1, 2, 3]).propose(3) == [4, 5, 6]


def test_a_longer_match_wins_over_a_later_one():
    assert index_of([1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]).propose(1) == [7]


def test_of_equal_matches_the_latest_wins():
    assert index_of([2, 3, 7, 5, 2, 3, 8, 6, 2, 3]).propose(1) == [8]


def test_matches_beyond_the_longest_are_not_told_apart(monkeypatch):
    tokens = [1, 2, 3, 7, 9, 2, 3, 8, 1, 2, 3]
    for longest, expected in ((2, 8), (3, 7)):
        monkeypatch.setattr(ngram, "_LONGEST", longest)
        assert index_of(tokens).propose(1) == [expected]


def test_a_text_that_repeats_itself_goes_on_repeating():
    assert index_of([5, 1, 2, 1, 2, 1, 2]).propose(5) == [1, 2, 1, 2, 1]
    assert index_of([4, 4, 4]).propose(4) == [4, 4, 4, 4]


@pytest.mark.parametrize("tokens", [[], [1], [1, 2], [1, 2, 3, 4, 5], [0, 0, 1]])
def test_new_text_gets_no_proposal(tokens):
    assert index_of(tokens).propose(4) == []


def test_one_token_is_a_match():
    assert index_of([3, 8, 1, 3]).propose(1) == [8]  # a wider verification costs next to nothing


def test_the_buffers_unused_part_is_no_text():
    """The buffer starts as zeros, and a match may run out of text at its beginning."""
    assert index_of([7, 0]).propose(2) == []
    assert index_of([0, 0, 5, 0, 0, 0]).propose(1) == [0]
    assert index_of([1, 5, 1, 5, 1]).propose(3) == [5, 1, 5]


def test_a_text_larger_than_the_first_buffer_keeps_its_beginning():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 10**6, 3000).tolist()
    unlimited = index_of(tokens)
    by_one = NgramIndex()
    for token in tokens:
        by_one.extend([token])
    for index in (unlimited, by_one):
        index.extend(tokens[:40])
        assert index.propose(8) == tokens[40:48]


@pytest.mark.parametrize("longest", [32, 2, 4])
def test_every_short_text_agrees_with_the_slow_reference(longest, monkeypatch):
    monkeypatch.setattr(ngram, "_LONGEST", longest)
    for size in range(9):
        for tokens in itertools.product(range(2), repeat=size):
            found = index_of(tokens).propose(5)
            assert found == slowly(tokens, 5, longest=longest), tokens


@pytest.mark.parametrize("letters", [2, 3, 5])
def test_random_texts_agree_with_the_slow_reference_as_they_grow(letters):
    rng = np.random.default_rng(letters)
    index, tokens, proposed = NgramIndex(), [], 0
    while len(tokens) < 400:
        more = rng.integers(0, letters, rng.integers(1, 9)).tolist()
        index.extend(more)
        tokens += more
        found = index.propose(7)
        assert found == slowly(tokens, 7)
        proposed += len(found)
    assert proposed > 300
