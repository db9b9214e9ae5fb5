"""Speculation caches for tests."""

from __future__ import annotations

from ssd_jax.speculation.cache import Entry, SpeculationCache

START = 10


def branch(row: int, path: tuple[int, ...], tokens: tuple[int, ...] = (), **about) -> Entry:
    return Entry(row=row, path=path, tokens=tokens, **about)


def cache_of(*entries: Entry) -> SpeculationCache:
    cache = SpeculationCache(START)
    cache.fill(START, entries)
    return cache


def three() -> SpeculationCache:
    """For the proposal (1, 2): rejected at once, after 1, and not at all."""
    return cache_of(
        branch(0, (5,), (50, 51, 52)), branch(1, (1, 6), (60, 61, 62)), branch(2, (1, 2, 7), (70,))
    )


def row_found(cache: SpeculationCache) -> tuple[int, tuple[int, ...]] | None:
    hit = cache.find()
    return None if hit is None else (hit.entry.row, hit.entry.tokens[hit.used :])
