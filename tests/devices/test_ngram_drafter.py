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


def test_each_slot_proposes_of_its_own_text_as_point_masses_and_a_new_text_repeats_nothing():
    drafter = NgramDrafter(2, 3, 4)
    rows = []
    for slot, text in enumerate(([5, 6, 7], [8, 9, 3])):
        drafter.open(SlotOpening(slot, SamplingParams()))
        drafter.prefill(slot, text, 0, last=True)
        rows.append(DraftRow(slot, 3, text[:1], 3))
    drafted = drafter.propose(batch_of(rows, 2))
    assert drafted.lengths.tolist() == [3, 3]
    assert drafted.tokens[:, :3].tolist() == [[6, 7, 5], [9, 3, 8]]
    proposal = drafter.proposal()
    assert proposal is not None
    assert (proposal.support[..., 0] == proposal.tokens).all()
    assert (proposal.q == 1).all()
    drafter.open(SlotOpening(1, SamplingParams()))
    drafter.prefill(1, [4], 0, last=True)
    drafted = drafter.propose(batch_of([DraftRow(1, 1, [8], 3)], 2))
    assert drafted.lengths.tolist() == [0, 0]
