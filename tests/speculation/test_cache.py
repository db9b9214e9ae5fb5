"""The speculation cache finds the branch that the committed text is on, and no other."""

from __future__ import annotations

import itertools

import pytest

from ssd_jax.speculation.cache import Hit, SpeculationCache
from tests.speculation.cached import START, branch, cache_of, row_found, three


@pytest.mark.parametrize(
    ("committed", "found"),
    [((5,), (0, (50, 51, 52))), ((1, 6), (1, (60, 61, 62))), ((1, 2, 7), (2, (70,)))],
)
def test_the_outcome_finds_its_branch(committed, found):
    cache = three()
    cache.advance(committed)
    assert row_found(cache) == found
    hit = cache.find()
    assert hit is not None
    assert hit.used == 0
    assert hit.entry.k == len(committed) - 1


@pytest.mark.parametrize("committed", [(6,), (1, 5), (1, 2, 6), (2,), (1,), (1, 2)])
def test_an_outcome_that_was_not_prepared_is_a_miss(committed):
    cache = three()
    cache.advance(committed)
    assert cache.find() is None


def test_nothing_is_found_before_the_outcome_is_known():
    assert three().find() is None


def test_a_new_sequence_holds_nothing():
    cache = SpeculationCache(START)
    cache.advance([5])
    assert cache.find() is None


def test_it_tells_whether_anything_was_prepared_for_a_verification():
    assert not SpeculationCache(START).prepared(START)
    cache = three()
    assert cache.prepared(START)
    assert not cache.prepared(START + 1)
    cache.advance([5])
    cache.fill(START + 1, [])
    assert not cache.prepared(START)
    assert not cache.prepared(START + 1)


def test_a_branch_keeps_its_rank_for_the_figures():
    cache = cache_of(branch(0, (1, 5), (2,)), branch(1, (1, 6), (3,), rank=1))
    cache.advance([1, 6])
    assert cache.find() == Hit(branch(1, (1, 6), (3,), rank=1), 0)


def test_tokens_grow_while_the_draft_expands():
    cache = cache_of(branch(0, (5,)), branch(1, (6,)))
    cache.fill(START, [branch(0, (5,), (50,)), branch(1, (6,))])
    cache.advance([5])
    assert row_found(cache) == (0, (50,))
    cache.fill(START, [branch(0, (5,), (50, 51)), branch(1, (6,), (60,))])
    assert cache.find() == Hit(branch(0, (5,), (50, 51)), 0)


def test_an_outcome_that_was_prepared_is_found_before_its_first_token_is():
    """The controller then decides whether to wait for the draft."""
    cache = cache_of(branch(0, (5,)), branch(1, (6,), (60,)))
    cache.advance([5])
    assert row_found(cache) == (0, ())


def test_a_branch_serves_on_while_the_text_runs_along_it():
    cache = three()
    cache.advance([5])
    cache.advance([50])
    assert row_found(cache) == (0, (51, 52))
    cache.advance([51])
    assert row_found(cache) == (0, (52,))
    cache.advance([52])
    assert cache.find() is None


def test_a_branch_that_the_text_has_left_never_returns():
    cache = three()
    cache.advance([5])
    cache.advance([50, 99])
    assert cache.find() is None
    cache.fill(START, [branch(0, (5,), (50, 51, 52, 53))])
    cache.advance([52])
    assert cache.find() is None


def test_of_two_branches_for_one_outcome_the_lowest_row_counts():
    same = [branch(4, (5,), (50,)), branch(2, (5,), (60,)), branch(3, (5,), (70,))]
    for order in itertools.permutations(same):
        cache = cache_of(*order)
        cache.advance([5])
        assert row_found(cache) == (2, (60,))


def test_the_branch_of_the_very_outcome_comes_before_one_that_ran_into_it():
    entries = [branch(0, (5,), (6, 60)), branch(1, (5, 6), (61,))]
    for order in (entries, entries[::-1]):
        cache = cache_of(*order)
        cache.advance([5, 6])
        assert row_found(cache) == (1, (61,))


def test_new_branches_replace_the_old():
    cache = three()
    cache.advance([5])
    cache.fill(START + 1, [branch(0, (50, 8), (80,))])
    cache.advance([50, 8])
    assert row_found(cache) == (0, (80,))
    cache = three()
    cache.advance([5])
    cache.fill(START + 1, [branch(0, (9,), (90,))])
    cache.advance([50])
    assert cache.find() is None  # row 0 of before would have had two tokens left
