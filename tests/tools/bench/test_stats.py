from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.tools.bench import stats


def coverage(sample, truth: float, interval, trials: int = 250) -> float:
    """How often the interval of a sample holds the truth."""
    rng = np.random.default_rng(7)
    found = [interval(sample(rng)) for _ in range(trials)]
    return sum(estimate.low <= truth <= estimate.high for estimate in found) / trials


def rates(counts):
    """So many events, each in a second."""
    return [stats.Rate(count, 1.0) for count in counts]


@pytest.mark.more
def test_the_interval_of_a_median_covers_it_about_95_times_of_100():
    covered = coverage(lambda rng: rng.lognormal(size=31), 1.0, stats.median_interval)
    assert 0.92 <= covered <= 0.98  # standard error 0.014


@pytest.mark.more
def test_the_interval_of_a_paired_ratio_of_totals_covers_it_about_93_times_of_100():
    """Totals of some 30 prompts lean on the few long ones, of which a sample knows too little."""

    def sample(rng):
        base = rng.lognormal(sigma=1.0, size=31)  # prompts differ much more than variants
        return 1.5 * base * rng.lognormal(-0.005, sigma=0.1, size=31), base

    covered = coverage(sample, 1.5, lambda pair: stats.rate_ratio_interval(*map(rates, pair)))
    assert 0.89 <= covered <= 0.97  # standard error 0.016


def test_pairing_removes_what_differs_between_prompts():
    base = np.geomspace(1, 1000, 20)
    estimate = stats.rate_ratio_interval(rates(1.5 * base), rates(base))
    assert estimate.value == pytest.approx(1.5)
    assert estimate.high - estimate.low < 1e-12


def test_the_same_values_and_seed_give_the_same_interval():
    values = np.random.default_rng(0).normal(size=20)
    assert stats.median_interval(values) == stats.median_interval(values)


def test_more_values_narrow_the_interval():
    values = np.random.default_rng(0).normal(size=400)
    few, many = stats.median_interval(values[:20]), stats.median_interval(values)
    assert many.high - many.low < 0.5 * (few.high - few.low)


def test_below_six_values_there_is_a_median_but_no_interval():
    five, six = stats.median_interval([5, 1, 4, 2, 3]), stats.median_interval([5, 1, 4, 2, 3, 6])
    assert (five.value, five.low, five.high, five.count) == (3, None, None, 5)
    assert six.low < six.value < six.high
    assert stats.median_interval([]) is None


def test_a_rate_is_of_all_events_and_a_ratio_is_the_quotient_of_two_rates():
    fast, slow = [stats.Rate(10, 1), stats.Rate(100, 2)], [stats.Rate(10, 4), stats.Rate(100, 40)]
    assert stats.rate_interval(fast).value == pytest.approx(110 / 3)
    assert stats.rate_interval(slow).value == pytest.approx(2.5)
    ratio = stats.rate_ratio_interval(fast, slow)
    assert (ratio.value, ratio.count) == (pytest.approx(110 / 3 / 2.5), 2)


def test_a_run_of_no_time_has_no_rate():
    nothing = [stats.Rate(0, 0)] * 2
    assert stats.rate_interval(nothing) is stats.rate_interval([]) is None
    assert stats.rate_ratio_interval([stats.Rate(1, 1)] * 2, nothing) is None
