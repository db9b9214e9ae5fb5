"""Proposals of a drafter on the host: checked, and point masses unless it draws from its q."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.host_drafter import HostDrafter
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftBatch, Drafted, DraftSetup
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system import notices
from ssd_jax.testing.by_row import DraftRow, batch_of
from tests.sampling.evidence import ALPHA, p_value
from tests.sampling.rows import empty_history, repeated, rows, verify

SLOTS, K, IDS = 2, 2, 4
SETUP = DraftSetup(slots=SLOTS, k=K, ids=IDS, context=64, support=2)
BATCH = batch_of([DraftRow(0, 5, [1], 2), DraftRow(1, 7, [3], 1)], SLOTS)
LENGTHS, TOKENS = np.array([2, 1], np.int32), np.array([[2, 3], [1, 0]], np.int32)
SUPPORT = np.array([[[2, 0], [3, 1]], [[1, 3], [0, 0]]], np.int32)
Q = np.full((SLOTS, K, 2), 0.5, np.float32)


class Scripted(Drafter):
    """Proposes what it was given."""

    def __init__(self, drafted: Any, proposal: Any = None) -> None:
        self.k, self._drafted, self._proposal = K, drafted, proposal

    def propose(self, batch: DraftBatch) -> Any:
        return self._drafted

    def proposal(self) -> Any:
        return self._proposal


def proposed(drafted, proposal=None, *, setup=SETUP, batch=BATCH, width=3, draws=False):
    drafter = HostDrafter(
        Scripted(drafted, proposal), setup, name="Mine", width=width, draws_from_q=draws
    )
    return drafter.propose(batch), drafter.proposal()


def masses(proposal):
    return np.take_along_axis(proposal.q, proposal.support.argmax(-1)[..., None], -1)[..., 0]


def test_tokens_are_point_masses_and_fill_the_room_of_programs():
    drafted, proposal = proposed(Drafted(LENGTHS, TOKENS))
    assert drafted.lengths.tolist() == proposal.length.tolist() == [2, 1]
    assert drafted.tokens.tolist() == proposal.tokens.tolist() == [[2, 3, 0], [1, 0, 0]]
    assert proposal.support.shape == proposal.q.shape == (SLOTS, 3, 2)
    assert proposal.support[0, :2, 0].tolist() == [2, 3]
    assert proposal.q[0, :2].tolist() == [[1, 0], [1, 0]]


def test_what_the_drafter_writes_later_changes_nothing():
    tokens = TOKENS.copy()
    _, proposal = proposed(Drafted(LENGTHS, tokens))
    tokens[:] = 0
    assert proposal.tokens[0, :2].tolist() == [2, 3]


def test_a_q_counts_only_where_the_draft_declares_that_it_draws_from_it():
    given = Proposal(TOKENS, LENGTHS, SUPPORT, Q)
    _, ignored = proposed(Drafted(LENGTHS, TOKENS), given)
    assert masses(ignored)[0, :2].tolist() == [1, 1]
    _, taken = proposed(Drafted(LENGTHS, TOKENS), given, draws=True)
    assert (taken.support[0, :2] == SUPPORT[0]).all()
    assert (taken.q[0, :2] == 0.5).all()


@pytest.mark.parametrize(
    ("what", "wrong"),
    {
        "no sum of 1": ("q", 0.4),
        "not finite": ("q", np.nan),
        "negative": ("q", -0.5),
        "an id that is none": ("support", IDS),
        "an id far outside": ("support", 2**31 - 1),
        "an id twice": ("support", 3),
    }.items(),
)
def test_from_a_malformed_q_on_tokens_are_point_masses_and_a_line_says_so(what, wrong, monkeypatch):
    name, value = wrong
    monkeypatch.setattr(notices, "_logged", {})
    given = {"support": SUPPORT.copy(), "q": Q.copy()}
    given[name][0, 1, 1] = value
    _, proposal = proposed(Drafted(LENGTHS, TOKENS), Proposal(TOKENS, LENGTHS, **given), draws=True)
    assert proposal.q[0, 0].tolist() == [0.5, 0.5]  # it was drawn before
    assert proposal.q[0, 1].tolist() == [1, 0]
    assert proposal.support[0, 1].tolist() == [3, -1]
    assert proposal.q[1, 0].tolist() == [0.5, 0.5]
    assert any("draft Mine" in line for line in notices._logged)


@pytest.mark.parametrize(
    ("drafted", "message"),
    [
        (None, "returned None, and must return a Drafted"),
        (Drafted(LENGTHS, TOKENS + 2), r"Drafted.tokens\[0, 0\] is 4, and ids are 0 to 3"),
        (Drafted(LENGTHS, TOKENS - 4), r"Drafted.tokens\[0, 0\] is -2, and ids"),
        (Drafted(LENGTHS, TOKENS[:, :1]), r"tokens has the shape \(2, 1\), and must have \(2, 2\)"),
        (Drafted(LENGTHS, TOKENS / 1.0), "tokens has the dtype float64, and must have integers"),
        (Drafted(LENGTHS, [[1], [2, 3]]), r"tokens is no array: \[\[1\], \[2, 3\]\]"),
        (Drafted(LENGTHS + 1, TOKENS), r"lengths\[0\] is 3, and 0 to 2 is possible"),
        (Drafted(np.array([0, 2]), TOKENS), r"lengths\[1\] is 2, and 0 to 1 is possible"),
        (Drafted(-LENGTHS, TOKENS), r"lengths\[0\] is -2"),
        (Drafted(LENGTHS[:1], TOKENS), r"lengths has the shape \(1,\), and must have \(2,\)"),
    ],
)
def test_a_malformed_proposal_is_refused(drafted, message):
    with pytest.raises(InputError, match=f"draft Mine: .*{message}"):
        proposed(drafted)


def test_nothing_may_be_proposed_for_an_idle_row():
    idle = batch_of([DraftRow(0, 5, [1], 2)], SLOTS)
    with pytest.raises(InputError, match=r"lengths\[1\] is 1, and 0 to 0 is possible"):
        proposed(Drafted(LENGTHS, TOKENS), batch=idle)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, r"support must have the shape \(2, 2, 2\), or fewer ids"),
        (Proposal(TOKENS, LENGTHS, np.zeros((2, 2, 3), int), Q), "support must have the shape"),
        (Proposal(TOKENS, LENGTHS, SUPPORT[:, :1], Q), r"support has the shape \(2, 1, 2\)"),
        (Proposal(TOKENS, LENGTHS, SUPPORT, Q[:, :1]), r"q has the shape \(2, 1, 2\)"),
        (Proposal(TOKENS, LENGTHS, SUPPORT / 1, Q), "support has the dtype float64"),
        (Proposal(TOKENS, LENGTHS, SUPPORT, SUPPORT), "q has the dtype int32, and must have num"),
    ],
)
def test_a_declared_q_of_another_shape_is_refused(given, message):
    with pytest.raises(InputError, match=message):
        proposed(Drafted(LENGTHS, TOKENS), given, draws=True)


LAW = np.array([0.5, 0.3, 0.15, 0.05])
TRIES = 2000


def texts(draws, *, lies=True):
    """First tokens under the ratio rule, where a draft says that it proposes 3 with q(3) = .05.

    Args:
      lies: it always proposes 3.
    """
    lengths, tokens = np.full(TRIES, 1, np.int32), np.full((TRIES, 1), 3, np.int32)
    if not lies:
        tokens[np.random.default_rng(0).random(TRIES) >= 0.05] = 0
    support = np.tile(np.array([3, 0], np.int32), (TRIES, 1, 1))
    q = np.tile(np.array([0.05, 0.95], np.float32), (TRIES, 1, 1))
    setup = DraftSetup(slots=TRIES, k=1, ids=IDS, context=64, support=2)
    batch = batch_of([DraftRow(slot, 5, [1], 1) for slot in range(TRIES)], TRIES)
    given = Proposal(tokens, lengths, support, q)
    _, proposal = proposed(
        Drafted(lengths, tokens), given, setup=setup, batch=batch, width=1, draws=draws
    )
    logits = np.broadcast_to(np.log(LAW, dtype=np.float32), (TRIES, 2, IDS))
    sampling = repeated(rows({}), TRIES)._replace(request=np.arange(TRIES, dtype=np.uint32))
    start = np.full(TRIES, 5, np.int32)
    history = empty_history(TRIES, IDS)
    outcome = verify(logits, proposal, sampling, start, history, tokens=IDS)
    first = np.where(np.asarray(outcome.accepted) > 0, tokens[:, 0], np.asarray(outcome.bonus))
    return np.bincount(first, minlength=IDS)


def test_a_draft_that_lies_about_its_q_leaves_the_targets_distribution():
    assert p_value(texts(draws=False), LAW) > ALPHA
    assert p_value(texts(draws=True), LAW) < ALPHA  # planted: its q is trusted


def test_a_draft_that_draws_from_its_q_leaves_the_targets_distribution():
    assert p_value(texts(draws=True, lies=False), LAW) > ALPHA
    assert p_value(texts(draws=False, lies=False), LAW) > ALPHA
