"""A draft elsewhere gets each token of a text once, and reuses only pages that it has filled."""

from __future__ import annotations

import numpy as np

from ssd_jax.roles.records import SlotOpening, no_promotion
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.draft_texts import DraftTexts

PROMPT = [7, 8, 9]
SIZE = 4


def opening(*pages, slot=0, reused=0):
    return SlotOpening(slot, SamplingParams(), pages=pages, reused=reused)


class Rounds:
    """Two texts, and what the draft was given of them."""

    def __init__(self):
        self.texts = DraftTexts(0)
        self.given = []
        for slot in range(2):
            self.texts.open(opening(slot=slot))
            self.texts[slot].prefill(PROMPT, 0)

    def teach(self, slot):
        self.texts.teach(slot, lambda tokens, offset: self.given.append((slot, offset, tokens)))

    def round(self, *, usable=True, **committed):
        """A round that commits tokens in some slots; returns what the draft has to count."""
        self.request = no_promotion(2, 2)
        for slot, tokens in ((int(name[1:]), tokens) for name, tokens in committed.items()):
            self.request.position[slot] = len(self.texts[slot].tokens) + len(tokens) - 1
            self.request.committed[slot, : len(tokens)] = tokens
        self.given.clear()
        made = self.texts.record(self.request, self.teach if usable else None)
        return [[token for token in row if token >= 0] for row in made.committed.tolist()]


def test_a_prompt_is_given_once_and_each_committed_token_counted_once():
    rounds = Rounds()
    assert rounds.round(s0=[], s1=[]) == [[], []]
    assert rounds.given == [(0, 0, PROMPT), (1, 0, PROMPT)]
    rounds.texts.expand([0, 1])
    assert rounds.round(s0=[1, 2], s1=[3]) == [[1, 2], [3]]
    assert rounds.given == []


def test_rounds_that_were_missed_are_made_up_for():
    rounds = Rounds()
    rounds.round(s0=[])
    rounds.texts.expand([0])
    assert rounds.round(usable=False, s0=[1, 2, 3]) == [[], []]
    assert rounds.round(usable=False, s0=[4]) == [[], []]
    assert rounds.round(s0=[5]) == [[1, 2, 3, 4, 5], []]  # more than a round commits
    assert rounds.given == [(0, 2, [9, 1, 2, 3, 4, 5])]


def test_a_slot_without_a_record_in_a_round_is_given_what_its_last_one_lacked():
    rounds = Rounds()
    rounds.round(s0=[], s1=[])
    rounds.texts.expand([0, 1])
    rounds.round(s1=[1])
    rounds.texts.expand([1])
    assert rounds.round(s0=[2], s1=[3]) == [[2], [3]]
    assert rounds.given == [(0, 2, [9, 2])]


def test_tokens_of_a_request_that_failed_come_again_and_count_once():
    rounds = Rounds()
    rounds.round(s0=[])
    rounds.texts.expand([0])
    rounds.round(s0=[1, 2])
    again = rounds.texts.record(rounds.request, rounds.teach)
    assert rounds.texts[0].tokens == [*PROMPT, 1, 2]
    assert (again.committed == -1).all()
    assert rounds.given == [(0, 4, [2])]


def test_another_draft_is_given_all_of_a_text():
    rounds = Rounds()
    rounds.round(s0=[])
    rounds.texts.expand([0])
    rounds.round(s0=[1, 2])
    rounds.texts.forget(0)
    assert rounds.round(s0=[3]) == [[1, 2, 3], []]
    assert rounds.given == [(0, 0, [*PROMPT, 1, 2, 3])]


def test_a_promotion_is_not_written_to():
    rounds = Rounds()
    rounds.round(s0=[])
    rounds.round(s0=[1])
    np.testing.assert_array_equal(rounds.request.committed, [[1, -1, -1], [-1, -1, -1]])


def filled(tokens, *, size=SIZE, pages=(3, 1, 2)):
    """Texts of which the first tokens were given to the draft, in slot 0."""
    texts = DraftTexts(size)
    texts.open(opening(*pages))
    texts[0].prefill(list(range(tokens)), 0)
    texts.teach(0, lambda tokens, offset: None)
    return texts


def reused(texts, request):
    """Positions that another request in slot 1 may reuse."""
    texts.open(request)
    return texts.reusable(1).reused


def test_pages_that_were_filled_are_reused_and_nothing_else():
    # 7 tokens fill one page, and a part of the next.
    assert reused(filled(7), opening(3, 1, 5, slot=1, reused=8)) == 4
    assert reused(filled(8), opening(3, 1, 5, slot=1, reused=8)) == 8
    assert reused(filled(8), opening(3, 1, 5, slot=1)) == 0


def test_another_draft_has_filled_nothing():
    texts = filled(12)
    texts.forget_pages()
    assert reused(texts, opening(3, 1, 5, slot=1, reused=8)) == 0


def test_pages_that_others_got_since_are_not_reused():
    texts = filled(12)
    texts.open(opening(3, 2, 1, slot=0, reused=4))
    assert reused(texts, opening(3, 1, slot=1, reused=8)) == 4
    texts = filled(12)
    texts.set_pages(0, (3, 1, 2, 9))
    texts.lose([1])
    assert reused(texts, opening(3, 1, slot=1, reused=8)) == 4


def test_slots_with_pages_of_their_own_reuse_none():
    texts = filled(100, size=0, pages=())
    assert texts.reusable(0).reused == 0


def tree_round(rounds, node, *, usable=True):
    """The row of its tree at which slot 0 is said to have ended, as the draft is told it."""
    request = no_promotion(2, 2, nodes=4)
    position = len(rounds.texts[0].tokens)
    request.position[0], request.committed[0, 0], request.node[0] = position, 1, node
    return rounds.texts.record(request, rounds.teach if usable else None).node


def test_a_tree_whose_leaves_were_not_run_moves_nothing_into_the_text_that_is_given_anew():
    rounds = Rounds()
    tree_round(rounds, 0)
    rounds.texts.expand([0])
    assert tree_round(rounds, 3).tolist() == [3, 0]
    rounds.given.clear()
    assert tree_round(rounds, 2).tolist() == [0, 0]  # nothing was expanded: the text comes again
    assert rounds.given == [(0, 4, [1, 1])]
    rounds.texts.expand([0])
    assert tree_round(rounds, 2, usable=False).tolist() == [2, 0]
    assert tree_round(rounds, 1).tolist() == [0, 0]
