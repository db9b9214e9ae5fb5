"""A fan-out policy divides the budget among the numbers of accepted tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ssd_jax.speculation.fan_out import (
    FanOut,
    GeometricFanOut,
    ListedFanOut,
    MeasuredFanOut,
    UniformFanOut,
    VerificationStats,
)
from ssd_jax.speculation.fan_out_flag import POLICIES
from ssd_jax.speculation.power_law import share
from tests.speculation.budgets import BUDGETS, LENGTHS, RATES, require_whole

FINE = 10_000  # branches a branch, to see counts before rounding


def all_policies() -> list[FanOut]:
    listed = ListedFanOut((4, *[0] * 15, 12), (0, *[1] * 15, 1))
    named = [policy.make() for policy in POLICIES.values()]
    return [*named, listed, *(GeometricFanOut(acceptance=a) for a in RATES)]


def unrounded(policy: FanOut, length: int, budget: int) -> np.ndarray:
    return np.array(policy.counts(length, budget * FINE, "hit")) / FINE


def chance_of_a_miss(counts: np.ndarray, a: float, r: float) -> float:
    """The paper's power law, 1 - p_hit(F) = F^-r, averaged over k."""
    k = np.arange(len(counts))
    odds = np.where(k < len(counts) - 1, a**k * (1 - a), a**k)
    return float(np.sum(odds * counts**-r))


@pytest.mark.parametrize("policy", all_policies(), ids=lambda policy: type(policy).__name__)
def test_the_whole_budget_is_used_and_the_last_slot_is_never_empty(policy):
    for length, budget, after in itertools.product(LENGTHS, BUDGETS, ("hit", "miss")):
        require_whole(policy.counts(length, budget, after), length, budget)


def test_with_nothing_proposed_the_whole_budget_goes_to_the_one_outcome():
    for policy in all_policies():
        assert policy.counts(0, 16, "miss") == (16,)


def test_uniform_counts_differ_by_one_at_most():
    for length, budget in itertools.product(LENGTHS, BUDGETS):
        counts = UniformFanOut().counts(length, budget, "hit")
        assert max(counts) - min(counts) <= 1
    assert UniformFanOut().counts(4, 16, "hit") == (4, 3, 3, 3, 3)


def test_geometric_counts_fall_with_k_until_the_last():
    for length, budget, a in itertools.product(LENGTHS, BUDGETS, RATES):
        before_last = GeometricFanOut(acceptance=a).counts(length, budget, "hit")[:-1]
        assert list(before_last) == sorted(before_last, reverse=True)


@pytest.mark.parametrize(
    ("a", "expected", "miss"),
    [
        (0.8, [3.9, 3.5, 3.1, 2.8, 2.5, 2.2, 2.0, 4.0], 0.316),
        (0.6, None, 0.261),
        (0.9, [None] * 7 + [6.4], 0.280),
    ],
)
def test_geometric_follows_the_closed_form(a, expected, miss):
    """Theorem 12 with K = 7, M = 24, r = 1; uniform misses a third."""
    counts = unrounded(GeometricFanOut(acceptance=a), 7, 24)
    for value, known in zip(counts, expected or [], strict=False):
        assert known is None or round(float(value), 1) == known
    assert round(chance_of_a_miss(counts, a, r=1), 3) == miss
    assert round(chance_of_a_miss(unrounded(UniformFanOut(), 7, 24), a, r=1), 3) == 0.333


@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("a", [0.3, 0.8, 0.95])
def test_no_shift_between_two_k_makes_the_geometric_fan_out_miss_less(a, r):
    best = unrounded(GeometricFanOut(acceptance=a, r=r), 5, 24)
    least = chance_of_a_miss(best, a, r)
    for source, sink in itertools.permutations(range(6), 2):
        moved = best.copy()
        moved[[source, sink]] += [-0.05 * best[source], 0.05 * best[source]]
        assert chance_of_a_miss(moved, a, r) > least


def test_geometric_is_rounded_to_whole_branches():
    assert GeometricFanOut(acceptance=0.8).counts(7, 24, "hit") == (4, 3, 3, 3, 3, 2, 2, 4)


def test_geometric_starts_from_a_guess_and_learns_the_acceptance_rate():
    policy, rng = GeometricFanOut(), np.random.default_rng(0)
    assert policy.acceptance("hit") == pytest.approx(0.8)
    for _ in range(3000):
        length = int(rng.integers(0, 6))
        accepted = rng.random(length) < 0.4
        policy.observe(VerificationStats(int(np.argmin([*accepted, False])), length, "hit"))
    assert policy.acceptance("hit") == pytest.approx(0.4, abs=0.03)


def test_a_handful_of_rounds_outweighs_the_first_guess():
    policy = GeometricFanOut()
    for _ in range(16):
        policy.observe(VerificationStats(0, 4, "hit"))
    assert policy.acceptance("hit") < 0.3


def test_only_judged_tokens_count():
    """Of 4 tokens with 1 accepted the second was rejected, and the rest never looked at."""
    policy = GeometricFanOut(acceptance=0.5)
    for _ in range(1000):
        policy.observe(VerificationStats(1, 4, "hit"))
    assert policy.acceptance("hit") == pytest.approx(0.5)
    policy.observe(VerificationStats(0, 0, "hit"))
    assert policy.acceptance("hit") == pytest.approx(0.5)


def test_the_estimate_stays_within_its_limits():
    always, never = GeometricFanOut(), GeometricFanOut()
    for _ in range(10_000):
        always.observe(VerificationStats(4, 4, "hit"))
        never.observe(VerificationStats(0, 4, "hit"))
    assert always.acceptance("hit") == 0.99
    assert never.acceptance("hit") == 0.01


@pytest.mark.parametrize("policy", [GeometricFanOut(), MeasuredFanOut()])
def test_what_a_backup_gets_accepted_says_nothing_about_the_draft(policy):
    before = policy.counts(4, 16, "hit")
    for _ in range(1000):
        policy.observe(VerificationStats(0, 4, "miss"))
    assert policy.counts(4, 16, "hit") == before
    assert policy.counts(4, 16, "miss")[0] > 10


def test_shares_are_in_proportion_and_the_remainder_goes_to_the_largest_fractions():
    assert share([1, 2, 1], 8) == (2, 4, 2)
    assert share([10, 24, 16], 5) == (1, 2, 2)  # 1.0, 2.4, 1.6
    assert share([0, 1], 3) == (0, 3)


def test_equal_remainders_are_resolved_by_place():
    assert share([1, 1, 1], 4) == (2, 1, 1)
    assert share([0.1] * 7, 10) == (2, 2, 2, 1, 1, 1, 1)
    assert share([3, 1, 1, 3], 2) == (1, 0, 0, 1)


def test_random_shares_are_within_one_of_their_quota_and_in_order():
    rng = np.random.default_rng(0)
    for _ in range(500):
        weights, total = rng.random(int(rng.integers(1, 18))), int(rng.integers(0, 70))
        counts = np.array(share(weights.tolist(), total))
        assert counts.sum() == total
        assert np.all(np.abs(counts - weights / weights.sum() * total) < 1)
        assert np.all(np.diff(counts[np.argsort(weights)]) >= 0)
