"""Prompt lookup as a drafter."""

from __future__ import annotations

from ssd_jax.devices.ngram_drafter import NgramDrafter
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.by_row import DraftRow, batch_of


def test_what_is_told_twice_counts_once():
    """A step that was interrupted tells its tokens again."""
    drafter = NgramDrafter(1, 3, 3)
    drafter.open(SlotOpening(0, SamplingParams()))
    drafter.prefill(0, [5, 6, 7, 8], 0, last=True)
    row = DraftRow(0, 4, [5], 3)
    for _ in range(3):
        drafted = drafter.propose(batch_of([row], 1))
        assert drafted.tokens[0].tolist() == [6, 7, 8]
    drafted = drafter.propose(batch_of([DraftRow(0, 6, [6, 7], 3)], 1))
    assert drafted.tokens[0].tolist() == [8, 5, 6]
