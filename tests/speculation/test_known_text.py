"""A draft elsewhere is told each token of a text once, whatever rounds it has missed."""

from __future__ import annotations

import numpy as np

from ssd_jax.roles.records import promotion
from ssd_jax.speculation.known_text import KnownText, promoted

PROMPT = [7, 8, 9]


class Taught:
    """Two texts, and what the draft was told of them."""

    def __init__(self):
        self.texts = {slot: KnownText() for slot in range(2)}
        self.told = []
        for text in self.texts.values():
            text.prefill(PROMPT, 0)

    def teach(self, slot):
        self.texts[slot].teach(lambda tokens, offset: self.told.append((slot, offset, tokens)))

    def round(self, *, serving=True, **committed):
        """A round that commits tokens in some slots; returns what the draft has to count."""
        asked = promotion(2, 2)
        for slot, tokens in ((int(name[1:]), tokens) for name, tokens in committed.items()):
            asked.position[slot] = len(self.texts[slot].tokens) + len(tokens) - 1
            asked.committed[slot, : len(tokens)] = tokens
        self.told.clear()
        self.asked = asked
        found = promoted(self.texts, asked, self.teach if serving else None)
        return [[token for token in row if token >= 0] for row in found.committed.tolist()]

    def expanded(self, *slots):
        for slot in slots:
            self.texts[slot].whole = True


def test_a_prompt_is_told_once_and_each_committed_token_counted_once():
    taught = Taught()
    assert taught.round(s0=[], s1=[]) == [[], []]
    assert taught.told == [(0, 0, PROMPT), (1, 0, PROMPT)]
    taught.expanded(0, 1)
    assert taught.round(s0=[1, 2], s1=[3]) == [[1, 2], [3]]
    assert taught.told == []


def test_rounds_that_were_missed_are_made_up_for():
    taught = Taught()
    taught.round(s0=[])
    taught.expanded(0)
    assert taught.round(serving=False, s0=[1, 2, 3]) == [[], []]
    assert taught.round(serving=False, s0=[4]) == [[], []]
    assert taught.round(s0=[5]) == [[1, 2, 3, 4, 5], []]  # more than a round commits
    assert taught.told == [(0, 2, [9, 1, 2, 3, 4, 5])]


def test_a_slot_without_a_record_in_a_round_is_taught_what_its_last_one_lacked():
    taught = Taught()
    taught.round(s0=[], s1=[])
    taught.expanded(0, 1)
    taught.round(s1=[1])
    taught.expanded(1)
    assert taught.round(s0=[2], s1=[3]) == [[2], [3]]
    assert taught.told == [(0, 2, [9, 2])]


def test_what_an_interrupted_step_has_told_comes_again_and_counts_once():
    taught = Taught()
    taught.round(s0=[])
    taught.expanded(0)
    taught.round(s0=[1, 2])
    again = promoted(taught.texts, taught.asked, taught.teach)
    assert taught.texts[0].tokens == [*PROMPT, 1, 2]
    assert (again.committed == -1).all()
    assert taught.told == [(0, 4, [2])]


def test_another_draft_is_told_all_of_it():
    taught = Taught()
    taught.round(s0=[])
    taught.expanded(0)
    taught.round(s0=[1, 2])
    taught.expanded(0)
    taught.texts[0].forget()
    taught.texts[0].whole = False
    assert taught.round(s0=[3]) == [[1, 2, 3], []]
    assert taught.told == [(0, 0, [*PROMPT, 1, 2, 3])]


def test_a_promotion_is_not_written_to():
    taught = Taught()
    taught.round(s0=[])
    taught.round(s0=[1])
    np.testing.assert_array_equal(taught.asked.committed, [[1, -1, -1], [-1, -1, -1]])
