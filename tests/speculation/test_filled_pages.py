"""A draft elsewhere reuses only pages that it has filled itself."""

from __future__ import annotations

from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.filled_pages import FilledPages

SIZE = 4


def opening(*pages, reused=0, slot=0):
    return SlotOpening(slot, SamplingParams(), pages=pages, reused=reused)


def test_what_it_was_taught_is_reused_and_nothing_else():
    filled = FilledPages(SIZE)
    first = opening(3, 1, 2)
    filled.open(first)
    filled.taught(first, 7)  # one page, and a part of the next
    assert filled.known(opening(3, 1, 5, reused=8)).reused == 4
    filled.taught(first, 8)
    assert filled.known(opening(3, 1, 5, reused=8)).reused == 8
    assert filled.known(opening(3, 1, 5)).reused == 0


def test_another_draft_has_filled_nothing():
    filled, first = FilledPages(SIZE), opening(3, 1, 2)
    filled.open(first)
    filled.taught(first, 12)
    filled.forget()
    assert filled.known(opening(3, 1, 5, reused=8)).reused == 0


def test_pages_that_others_got_since_are_forgotten():
    filled, first = FilledPages(SIZE), opening(3, 1, 2)
    filled.open(first)
    filled.taught(first, 12)
    filled.open(opening(3, 2, 1, reused=4))
    assert filled.known(opening(3, 1, reused=8)).reused == 4
    assert filled.known(opening(1, 3, reused=8)).reused == 0


def test_slots_with_pages_of_their_own_reuse_none():
    filled, first = FilledPages(0), opening()
    filled.open(first)
    filled.taught(first, 100)
    assert filled.known(first) == first
