"""`measured` divides the budget by observed outcomes, and learns how fast misses become rarer."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from ssd_jax.speculation.acceptance import odds
from ssd_jax.speculation.fan_out import GeometricFanOut, MeasuredFanOut, VerificationStats
from ssd_jax.speculation.power_law import Ranks, exponent
from tests.speculation.budgets import BUDGETS, LENGTHS, require_whole

FINE = 100_000


def verified(rng: np.random.Generator, rates: list[float]) -> VerificationStats:
    accepted = rng.random(len(rates)) < rates
    return VerificationStats(int(np.argmin([*accepted, False])), len(rates), "hit")


def test_the_measured_policy_begins_as_the_geometric_one():
    for length, budget in itertools.product(LENGTHS, BUDGETS):
        for after in ("hit", "miss"):
            expected = GeometricFanOut().counts(length, budget, after)
            assert MeasuredFanOut().counts(length, budget, after) == expected


def test_the_whole_budget_is_used_and_the_last_slot_is_never_empty():
    policy, rng = MeasuredFanOut(), np.random.default_rng(0)
    for _ in range(200):
        policy.observe(verified(rng, [0.1, 0.9, 0.5, 0.2])._replace(prepared=3, rank=1))
    for length, budget in itertools.product(LENGTHS, BUDGETS):
        require_whole(policy.counts(length, budget, "hit"), length, budget)


def test_the_measured_policy_learns_the_odds_of_each_k():
    policy, rng, rates = MeasuredFanOut(), np.random.default_rng(0), [0.95, 0.3, 0.9]
    for _ in range(4000):
        policy.observe(verified(rng, rates))
    expected = [0.05, 0.95 * 0.7, 0.95 * 0.3 * 0.1, 0.95 * 0.3 * 0.9]
    np.testing.assert_allclose(odds(policy.rates(3, "hit")), expected, atol=0.02)


def test_fan_outs_follow_theorem_12():
    policy, rng = MeasuredFanOut(), np.random.default_rng(1)
    for _ in range(3000):
        policy.observe(verified(rng, [0.9, 0.4]))
    counts = np.array(policy.counts(2, FINE, "hit")) / FINE
    weights = np.array(odds(policy.rates(2, "hit"))) ** (1 / (1 + policy.r))
    np.testing.assert_allclose(counts, weights / weights.sum(), atol=1e-4)


def test_records_of_other_lengths_teach_the_places_that_they_have():
    """The odds are conditioned on L: short records say nothing of the places behind them."""
    policy, rng = MeasuredFanOut(), np.random.default_rng(2)
    for _ in range(3000):
        policy.observe(verified(rng, [0.8, 0.5, 0.2][: rng.integers(1, 4)]))
    np.testing.assert_allclose(odds(policy.rates(1, "hit")), [0.2, 0.8], atol=0.03)
    np.testing.assert_allclose(odds(policy.rates(3, "hit")), [0.2, 0.4, 0.32, 0.08], atol=0.03)


def test_rates_stay_within_their_limits():
    always, never = MeasuredFanOut(), MeasuredFanOut()
    for _ in range(10_000):
        always.observe(VerificationStats(4, 4, "hit"))
        never.observe(VerificationStats(0, 4, "hit"))
    np.testing.assert_allclose(odds(always.rates(1, "hit")), [0.01, 0.99])
    np.testing.assert_allclose(odds(never.rates(1, "hit")), [0.99, 0.01])


@pytest.mark.parametrize("ever", [1.0, 0.5])
@pytest.mark.parametrize("r", [0.5, 1.0, 2.0])
def test_the_exponent_of_a_power_law_is_found_whatever_was_prepared(r, ever):
    """Censored by how much was prepared; and whatever share the first place has."""
    ranks, rng = Ranks(), np.random.default_rng(3)
    for _ in range(20_000):
        prepared = int(rng.integers(0, 12))
        place = int((rng.random() / ever) ** (-1 / r))
        ranks.observe(prepared, place if place < prepared else None)
    assert exponent(ranks) == pytest.approx(r, rel=0.1)


def test_the_exponent_is_1_until_something_is_known_and_within_limits_ever_after():
    assert exponent(Ranks()) == pytest.approx(1, abs=1e-3)
    near, far = Ranks(), Ranks()
    for _ in range(1000):
        near.observe(8, 1)
        far.observe(8, None)
    assert exponent(near) == pytest.approx(3, abs=1e-3)
    assert exponent(far) == pytest.approx(0.3, abs=1e-3)


def test_the_first_place_says_nothing_of_the_exponent():
    """However often it is found: fan-outs do not depend on a constant factor of the miss rate."""
    ranks = Ranks()
    for _ in range(1000):
        ranks.observe(8, 0)
    assert exponent(ranks) == pytest.approx(1, abs=1e-3)


def test_misses_that_do_not_get_rarer_flatten_the_fan_out_less():
    """A large r makes branches beyond the first ones worthless, and the fan-out even."""
    steep, flat = MeasuredFanOut(), MeasuredFanOut()
    for _ in range(500):
        steep.observe(VerificationStats(0, 0, "hit", prepared=8, rank=1))
        flat.observe(VerificationStats(0, 0, "hit", prepared=8, rank=None))
    assert steep.r == pytest.approx(3, abs=1e-3)
    assert flat.r == pytest.approx(0.3, abs=1e-3)
    spread = [np.ptp(policy.counts(4, 64, "hit")[:-1]) for policy in (steep, flat)]
    assert spread[0] < spread[1]
