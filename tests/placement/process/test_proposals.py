"""Proposals on the host: point masses, or a q that is a distribution to the last bits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ssd_jax.kernels.rows import row_sum
from ssd_jax.placement.host_proposals import HostProposals
from ssd_jax.wire.messages import RecordTokens
from tests.sampling.edits import Edit, edited

IDS = 60_000
TOKENS = [3, 5]


def winner(q):
    """A worker's answer: two tokens with this q [n], or these [2, n], over the first n ids each."""
    q = np.broadcast_to(np.float32(q), (1, 2, np.shape(q)[-1]))
    support = np.broadcast_to(np.arange(q.shape[-1], dtype=np.int32), q.shape)
    return RecordTokens(
        number=1,
        slots=np.array([0]),
        epochs=np.array([1]),
        lengths=np.array([2]),
        tokens=np.array([TOKENS]),
        parents=np.empty((1, 0), np.int32),
        confidence=np.zeros((1, 2), np.int32),
        sampled=np.array([0]),
        support=support,
        q=q,
        work=(),
        received=0.0,
        sent=0.0,
    )


def normalised(weights):
    """As a draft does it."""
    return np.asarray(jax.jit(lambda w: w / row_sum(w))(np.float32(weights)[None]))[0]


def taken(q):
    proposals = HostProposals(1, 2, len(q), IDS)
    proposals.put(np.int32([TOKENS]), np.int32([2]))
    return proposals.put_q(np.array([0]), winner(q)) == 0


@pytest.mark.parametrize("count", [8, 64, 259, 4095, 4096, 49_152])
def test_every_q_that_is_normalised_in_float32_is_taken(count):
    rng = np.random.default_rng(count)
    for weights in (
        rng.random(count),
        np.full(count, 0.1),
        rng.gamma(0.1, size=count) + 1e-30,
        np.exp(-20 * rng.random(count)),
    ):
        assert taken(normalised(weights))


@pytest.mark.parametrize("off", [1e-3, 1e-4, 1e-5, -1e-5, -1e-4])
def test_a_q_whose_sum_is_off_is_refused(off):
    """By more than rounding allows: 66 half units in the last place, for 64 ids."""
    q = normalised(np.random.default_rng(0).random(64))
    assert taken(q)
    assert not taken(q * np.float32(1 + off))
    first = q.copy()
    first[TOKENS[0]] += off
    assert not taken(first)


@pytest.mark.parametrize(("right", "expected"), [((1, 0), [True, False]), ((0, 1), [False, False])])
def test_tokens_before_the_first_malformed_q_keep_theirs(right, expected):
    q = np.full(8, 0.125)
    proposals = HostProposals(1, 2, len(q), IDS)
    proposals.put(np.int32([TOKENS]), np.int32([2]))
    shipped = np.where(np.array(right, bool)[:, None], q, np.nan)
    assert proposals.put_q(np.array([0]), winner(shipped)) == 1
    points = np.arange(len(q)) == 0
    np.testing.assert_array_equal(
        proposals.proposal().q[0], np.where(np.array(expected)[:, None], q, points)
    )


def cleared():
    """What a slot proposes after a round with a q."""
    proposals = HostProposals(1, 2, 8, IDS)
    proposals.put(np.int32([TOKENS]), np.int32([2]))
    assert proposals.put_q(np.array([0]), winner(np.full(8, 0.125))) == 0
    proposals.put(np.int32([TOKENS]), np.int32([2]))
    return proposals.proposal()


def test_point_masses_keep_nothing_of_an_earlier_q():
    now = cleared()
    assert (now.q.sum(axis=-1) == 1).all()
    assert (now.support[..., 1:] == -1).all()
    with edited([Edit(HostProposals, "put", "self._probs = None", "pass")]):
        assert (cleared().support[..., 1:] >= 0).all()
