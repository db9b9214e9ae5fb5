"""Drafts that read the text alone."""

from __future__ import annotations

import pytest

from ssd_jax.roles.records import DraftSetup, SlotOpening
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS, TextDrafter
from ssd_jax.testing.by_row import DraftRow, batch_of


def drafter_of(name, slots):
    return TextDrafter(TEXT_DRAFTS[name].make, DraftSetup(slots=slots, k=3, ids=99, context=64))


@pytest.mark.parametrize("name", TEXT_DRAFTS)
def test_tokens_told_twice_to_a_text_draft_count_once(name):
    """A step that was interrupted tells its tokens again."""
    drafter = drafter_of(name, 1)
    drafter.open(SlotOpening(0, SamplingParams()))
    for _ in range(2):
        drafter.prefill(0, [5, 6, 7, 8], 0, last=True)
    row = DraftRow(0, 4, [5], 3)
    expected = drafter.propose(batch_of([row], 1)).tokens[0].tolist()
    for _ in range(2):
        assert drafter.propose(batch_of([row], 1)).tokens[0].tolist() == expected
    if name == "ngram":
        assert expected == [6, 7, 8]
        drafted = drafter.propose(batch_of([DraftRow(0, 6, [6, 7], 3)], 1))
        assert drafted.tokens[0].tolist() == [8, 5, 6]


def test_each_slot_proposes_of_its_own_text_and_a_new_text_repeats_nothing():
    drafter = drafter_of("ngram", 2)
    rows = []
    for slot, text in enumerate(([5, 6, 7], [8, 9, 3])):
        drafter.open(SlotOpening(slot, SamplingParams()))
        drafter.prefill(slot, text, 0, last=True)
        rows.append(DraftRow(slot, 3, text[:1], 3))
    drafted = drafter.propose(batch_of(rows, 2))
    assert drafted.lengths.tolist() == [3, 3]
    assert drafted.tokens.tolist() == [[6, 7, 5], [9, 3, 8]]
    drafter.open(SlotOpening(1, SamplingParams()))
    drafter.prefill(1, [4], 0, last=True)
    drafted = drafter.propose(batch_of([DraftRow(1, 1, [8], 3)], 2))
    assert drafted.lengths.tolist() == [0, 0]
