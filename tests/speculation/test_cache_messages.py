"""Late, stale, replayed and garbled news of branches costs hits at most."""

from __future__ import annotations

import numpy as np

from ssd_jax.speculation.cache import Hit, SpeculationCache
from tests.speculation.cached import START, branch, cache_of, row_found, three


def test_late_branches_are_worth_what_the_text_has_left_of_them():
    cache = SpeculationCache(START)
    cache.advance([5])
    cache.advance([50, 51])
    cache.fill(START, [branch(0, (5,), (50, 51, 52, 53)), branch(1, (6,), (50, 51, 52))])
    assert row_found(cache) == (0, (52, 53))


def test_a_branch_that_fell_behind_the_text_serves_again_once_it_is_ahead():
    cache = cache_of(branch(0, (5,), (50,)))
    cache.advance([5])
    cache.advance([50, 51])
    assert cache.find() is None
    cache.fill(START, [branch(0, (5,), (50, 51, 52))])
    assert row_found(cache) == (0, (52,))


def test_tokens_that_arrive_off_the_text_are_stale():
    cache = cache_of(branch(0, (5,)))
    cache.advance([5, 99])
    cache.fill(START, [branch(0, (5,), (50, 51))])
    assert cache.find() is None


def test_a_duplicate_does_not_take_over_when_its_tokens_prove_right():
    """Its tokens would then be chosen by their content."""
    cache = SpeculationCache(START)
    cache.advance([5, 70])
    cache.fill(START, [branch(2, (5,), (60, 61)), branch(3, (5,), (70, 71))])
    assert cache.find() is None


def test_branches_older_than_those_held_are_ignored():
    cache = three()
    cache.advance([5])
    cache.fill(START + 1, [branch(0, (9,), (90,))])
    cache.fill(START, [branch(0, (5,), (9, 91))])
    cache.advance([9])
    assert row_found(cache) == (0, (90,))


def test_branches_from_beyond_the_text_are_ignored():
    cache = three()
    cache.fill(START + 1, [branch(0, (9,), (90,))])
    cache.advance([5])
    assert row_found(cache) == (0, (50, 51, 52))


def test_it_agrees_with_comparing_whole_texts_as_a_random_text_grows():
    """Few letters, so that hits, partial hits, late fills and misses are all frequent."""
    rng, seen = np.random.default_rng(0), {"miss": 0, "now": 0, "later": 0}

    def word(least: int, most: int) -> tuple[int, ...]:
        return tuple(rng.integers(0, 2, rng.integers(least, most)).tolist())

    for _ in range(150):
        text, cache, start, held = [0] * (START + 1), SpeculationCache(START), START, []
        for _ in range(12):
            if rng.random() < 0.6:
                start = int(rng.integers(start, len(text)))
                paths = sorted({word(1, 4) for _ in range(4)})
                held = [branch(row, path, word(0, 5)) for row, path in enumerate(paths)]
                cache.fill(start, held)
            committed = word(1, 4)
            text += committed
            cache.advance(committed)
            after = tuple(text[start + 1 :])
            used = {entry: len(after) - len(entry.path) for entry in held}
            on_path = [
                entry
                for entry, count in used.items()
                if (entry.path + entry.tokens)[: len(after)] == after
                and (count == 0 or 0 < count < len(entry.tokens))
            ]
            best = min(on_path, key=lambda entry: used[entry], default=None)
            assert cache.find() == (None if best is None else Hit(best, used[best]))
            seen["miss" if best is None else "later" if used[best] else "now"] += 1
    assert min(seen.values()) > 50
