"""Records and branches of a draft on the host: checked, and point masses unless it draws from q."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.host_branching import HostBranchingDraft
from ssd_jax.roles.protocols import BranchingDraft
from ssd_jax.roles.records import DraftSetup, ExpansionRequest, no_branches, record_request
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.testing.by_row import Promoted, promotion_of

SLOTS, K, M, IDS = 3, 2, 2, 5
SETUP = DraftSetup(slots=SLOTS, k=K, ids=IDS, context=64, support=2, branches=M)
MOVES = promotion_of(
    [
        Promoted(0, 4, 1, [1], winner=1, limit=2),
        Promoted(1, 6, 2, [2], tokens=[3]),  # a backup's
        Promoted(2, 8, 3, [3]),
    ],
    SLOTS,
    K,
)
MOVES.tokens[0] = [4, 1]  # of the branch that won
DRAFTS = np.array([0, 0, 2], np.int32)
DRAWN = np.array([[0, 0], [0, 0], [2, 4]], np.int32)
Q = np.full((SLOTS, K, 2), 0.5, np.float32)
SUPPORT = np.array([[[4, 0], [1, 0]], [[3, 0], [0, 1]], [[2, 0], [4, 0]]], np.int32)


class Scripted(BranchingDraft):
    """Answers what it was given; it is its own answer."""

    def __init__(self, **answers: Any) -> None:
        usual = {"lengths": DRAFTS, "tokens": DRAWN, "confidence": np.full((SLOTS, K), 3)}
        self.slots, self.k, self.branches, self._answers = SLOTS, K, M, usual | answers

    def record(self, request):
        return Answer(self._answers)

    def expand(self, request):
        return Answer(self._answers)


class Answer:
    def __init__(self, answers: dict[str, Any]) -> None:
        self._answers = answers

    def lengths(self):
        return self._answers["lengths"]

    def tokens(self):
        return self._answers["tokens"]

    def confidence(self):
        return self._answers["confidence"]

    def proposal(self):
        return self._answers["proposal"]

    def branches(self, forwards, until=None):
        return self._answers["branches"]


def recorded(drafts=DRAFTS, *, draws=False, **answers):
    draft = HostBranchingDraft(Scripted(**answers), SETUP, name="Mine", draws_from_q=draws)
    return draft.record(record_request(MOVES)._replace(drafts=drafts))


def test_a_record_has_the_tokens_of_the_promotion_or_those_drafted_just_in_time():
    answer = recorded()
    assert answer.lengths().tolist() == [0, 0, 2]
    assert answer.tokens().tolist() == [[4, 1], [3, 0], [2, 4]]
    proposal = answer.proposal()
    assert proposal.length.tolist() == [2, 1, 2]
    assert proposal.tokens.tolist() == [[4, 1], [3, 0], [2, 4]]
    assert proposal.support[..., 0].tolist() == [[4, 1], [3, -1], [2, 4]]
    assert proposal.q[..., 0].tolist() == [[1, 1], [1, 0], [1, 1]]
    assert (answer.confidence() == 3).all()


def test_a_draft_is_not_asked_for_what_it_did_not_draft():
    answer = recorded(np.zeros(SLOTS, np.int32), lengths=None, tokens=None)
    assert answer.lengths().tolist() == [0, 0, 0]
    assert answer.proposal().length.tolist() == [2, 1, 0]


def test_a_q_counts_only_where_it_is_declared_and_never_for_a_backup():
    """Its tokens are not the draft's, which cannot have drawn them."""
    given = Proposal(DRAWN, DRAFTS, SUPPORT, Q)
    ignored = recorded(proposal=given).proposal()
    assert ignored.q[..., 0].tolist() == [[1, 1], [1, 0], [1, 1]]
    taken = recorded(proposal=given, draws=True).proposal()
    assert taken.q[..., 0].tolist() == [[0.5, 0.5], [1, 0], [0.5, 0.5]]
    assert taken.support[[0, 2]].tolist() == SUPPORT[[0, 2]].tolist()


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        ({"lengths": DRAFTS + 1}, r"lengths\[0\] is 1, and 0 to 0 is possible"),
        ({"lengths": None}, "lengths has the dtype object"),
        ({"tokens": DRAWN + 1}, r"tokens\[2, 1\] is 5, and ids are 0 to 4"),
        ({"tokens": DRAWN[:, :1]}, r"tokens has the shape \(3, 1\), and must have \(3, 2\)"),
        ({"confidence": np.full((SLOTS, K), 8)}, r"confidence must be -1 \(unknown\), or classes"),
    ],
)
def test_a_malformed_record_is_refused(answers, message):
    answer = recorded(**answers)
    with pytest.raises(InputError, match=f"draft Mine: {message}"):
        _ = answer.lengths(), answer.tokens(), answer.confidence()


def expanded(branches):
    draft = HostBranchingDraft(Scripted(branches=branches), SETUP, name="Mine")
    counts, follow = np.zeros((SLOTS, K + 1), np.int32), np.zeros(SLOTS, bool)
    lowered = np.zeros((SLOTS, K), np.int32)
    return draft.expand(ExpansionRequest(counts, follow, lowered, forwards=2))


def branches_with(**changes):
    return no_branches(SLOTS, M, K, 2)._replace(**changes)


def test_the_same_branches_stay_the_same_object():
    """The controller tells by that whether anything has come."""
    answer = expanded(branches_with(bonus=np.full((SLOTS, M), 4)))
    first = answer.branches(1)
    assert first.bonus.tolist() == [[4, 4]] * SLOTS
    assert answer.branches(2) is first


@pytest.mark.parametrize("answer", [None, "late", "stale", "dead"])
def test_branches_may_be_absent(answer):
    assert expanded(answer).branches(1) == answer


@pytest.mark.parametrize(
    ("branches", "message"),
    [
        ("soon", "branches returned 'soon', and must return BranchTokens, None, or one of late"),
        ([], "branches returned"),
        (branches_with(bonus=np.full((SLOTS, M), IDS)), "bonus must be -1, or ids from 0 to 4"),
        (branches_with(bonus=np.full((SLOTS, M), -2)), "bonus must be -1"),
        (branches_with(bonus=np.full((SLOTS, M + 1), 1)), r"bonus has the shape \(3, 3\)"),
        (branches_with(lengths=np.full((SLOTS, M), K + 1)), r"lengths\[0, 0\] is 3, and 0 to 2"),
        (
            branches_with(lengths=np.full((SLOTS, M), 1), tokens=np.full((SLOTS, M, K), IDS)),
            r"tokens\[0, 0, 0\] is 5, and ids are 0 to 4",
        ),
        (branches_with(confidence=np.full((SLOTS, M, K), -2)), "confidence must be -1"),
        (branches_with(forwards=2.5), "forwards = 2.5"),
        (branches_with(absent={9: "late"}), "absent"),
    ],
)
def test_malformed_branches_are_refused(branches, message):
    with pytest.raises(InputError, match=f"draft Mine: .*{message}"):
        expanded(branches).branches(1)
