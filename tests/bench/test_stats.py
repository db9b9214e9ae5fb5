from __future__ import annotations

import numpy as np
import pytest

from ssd_jax.bench import stats


def coverage(sample, truth: float, interval, trials: int = 250) -> float:
    """How often the interval of a sample holds the truth."""
    rng = np.random.default_rng(7)
    found = [interval(sample(rng)) for _ in range(trials)]
    return sum(estimate.low <= truth <= estimate.high for estimate in found) / trials


@pytest.mark.more
def test_the_interval_of_a_median_covers_it_about_95_times_of_100():
    covered = coverage(lambda rng: rng.lognormal(size=31), 1.0, stats.median_interval)
    assert 0.92 <= covered <= 0.98  # standard error 0.014


@pytest.mark.more
def test_the_interval_of_a_paired_ratio_covers_it_about_95_times_of_100():
    def sample(rng):
        base = rng.lognormal(sigma=2.0, size=31)  # prompts differ much more than variants
        return 1.5 * base * rng.lognormal(sigma=0.1, size=31), base

    covered = coverage(sample, 1.5, lambda pair: stats.ratio_interval(*pair))
    assert 0.92 <= covered <= 0.98


def test_pairing_removes_what_differs_between_prompts():
    base = np.geomspace(1, 1000, 20)
    estimate = stats.ratio_interval(1.5 * base, base)
    assert estimate.median == pytest.approx(1.5)
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
    assert (five.median, five.low, five.high, five.count) == (3, None, None, 5)
    assert six.low < six.median < six.high
    assert stats.median_interval([]) is None


def test_only_prompts_with_both_numbers_are_paired():
    found = stats.ratio_interval([1.0, 2.0, None, 5.0], [10.0, 10.0, 30.0, None])
    assert (found.median, found.count) == (pytest.approx(0.15), 2)
