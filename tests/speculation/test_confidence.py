"""`confidence` gives branches to the outcomes that the draft's own probabilities make likely."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.speculation.fan_out import ConfidenceFanOut, MeasuredFanOut, VerificationStats
from tests.speculation.budgets import BUDGETS, LENGTHS, require_whole

LEAST, MOST = 0, len(EDGES)


def test_the_whole_budget_is_used_and_the_last_slot_is_never_empty():
    rng = np.random.default_rng(0)
    for length, budget in itertools.product(LENGTHS, BUDGETS):
        for _ in range(5):
            confidence = rng.integers(LEAST, MOST + 1, length).tolist()
            counts = ConfidenceFanOut().counts(length, budget, "hit", confidence)
            require_whole(counts, length, budget)


def test_branches_go_where_the_draft_was_unsure():
    sure = ConfidenceFanOut().counts(4, 16, "hit", [MOST] * 4)
    assert sure[-1] == max(sure)
    for place in range(4):
        confidence = [MOST] * 4
        confidence[place] = LEAST
        counts = ConfidenceFanOut().counts(4, 16, "hit", confidence)
        assert counts[place] == max(counts) > sure[place]


def test_after_a_token_that_is_always_rejected_nothing_is_prepared_but_the_tail():
    policy = ConfidenceFanOut()
    for _ in range(1000):
        policy.observe(VerificationStats(0, 1, "hit", confidence=(2,)))
    assert policy.acceptance(2) == pytest.approx(0.01, abs=0.005)
    assert policy.counts(3, 8, "hit", (2, MOST, MOST)) == (7, 0, 0, 1)


def test_counts_are_the_best_scores():
    """Against the formula, with shares 1/2, 1/6, 1/12 ... of the ranks."""
    policy, confidence, budget = ConfidenceFanOut(), (5, 2, 6), 9
    a = [policy.acceptance(level) for level in confidence]
    chances = [1 - a[0], a[0] * (1 - a[1]), a[0] * a[1] * (1 - a[2]), a[0] * a[1] * a[2]]
    scores = sorted(
        ((chances[k] / ((rank + 1) * (rank + 2)), k) for k in range(4) for rank in range(budget)),
        reverse=True,
    )[:budget]
    expected = tuple(sum(k == at for _, k in scores) for at in range(4))
    assert expected[-1] > 0
    assert policy.counts(3, budget, "hit", confidence) == expected


def test_only_judged_tokens_teach_the_acceptance_of_their_class():
    policy = ConfidenceFanOut()
    before = [policy.acceptance(level) for level in range(MOST + 1)]
    for _ in range(2000):
        policy.observe(VerificationStats(1, 4, "hit", confidence=(6, 3, 1, 1)))
    after = [policy.acceptance(level) for level in range(MOST + 1)]
    assert after[6] == 0.99
    assert after[3] == pytest.approx(0.01, abs=0.005)
    untouched = [level for level in range(MOST + 1) if level not in (6, 3)]
    assert [after[level] for level in untouched] == [before[level] for level in untouched]


def test_a_handful_of_rounds_outweighs_a_guess():
    policy = ConfidenceFanOut()
    for _ in range(8):
        policy.observe(VerificationStats(0, 1, "hit", confidence=(MOST,)))
    assert policy.acceptance(MOST) < 0.4


def test_ranks_of_the_tail_are_learned_apart():
    """Bonus tokens of k = L are always the first ones here, those of k < L never the first two."""
    policy = ConfidenceFanOut()
    before = policy.counts(2, 12, "hit", (4, 4))
    for _ in range(300):
        policy.observe(VerificationStats(2, 2, "hit", 4, 0, (4, 4)))
        policy.observe(VerificationStats(0, 2, "hit", 2, None, (4, 4)))
        policy.observe(VerificationStats(1, 2, "hit", 2, None, (4, 4)))
    assert policy.counts(2, 12, "hit", (4, 4))[-1] < before[-1]
    first, second = (policy._shares(ranks, 2) for ranks in (policy._last, policy._before_last))
    assert first[0] > 0.95
    assert second[0] < 0.05


def test_shares_of_ranks_never_rise():
    """Else the best outcomes would not be the first ranks."""
    policy = ConfidenceFanOut()
    for _ in range(300):
        policy.observe(VerificationStats(0, 1, "hit", 8, 5, (4,)))
    counts = policy.counts(1, 30, "hit", (4,))
    assert sum(counts) == 30
    shares = policy._shares(policy._before_last, 12)
    assert shares == sorted(shares, reverse=True)


@pytest.mark.parametrize("confidence", [(), (3, 2), (3, UNKNOWN, 2)])
def test_with_an_unknown_confidence_counts_are_those_of_the_measured_policy(confidence):
    policy, measured, rng = ConfidenceFanOut(), MeasuredFanOut(), np.random.default_rng(1)
    for _ in range(100):
        accepted = int(rng.integers(0, 4))
        verified = VerificationStats(
            accepted, 3, "miss", prepared=3, rank=accepted, confidence=(1, UNKNOWN, 1)
        )
        policy.observe(verified)
        measured.observe(verified)
    assert policy.counts(3, 16, "miss", confidence) == measured.counts(3, 16, "miss")


def test_records_of_unknown_confidence_teach_nothing():
    policy = ConfidenceFanOut()
    before = [policy.acceptance(level) for level in range(MOST + 1)]
    for _ in range(100):
        policy.observe(VerificationStats(0, 2, "miss", 3, 1, (UNKNOWN, UNKNOWN)))
        policy.observe(VerificationStats(1, 2, "miss", 3, 1, ()))
    assert [policy.acceptance(level) for level in range(MOST + 1)] == before
