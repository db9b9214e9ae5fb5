"""Medians and paired ratios with bootstrap intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

RESAMPLES = 5000
SEED = 0
FEWEST_FOR_INTERVAL = 6
"""The median lies between the least and the greatest of n values with probability 1 - 2^(1-n):
below six values, no interval made of them covers it with 95%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median of `count` values and its 95% interval; no interval below six values."""

    median: float
    low: float | None
    high: float | None
    count: int


def median_interval(values: Sequence[float]) -> Estimate | None:
    """The median with its 95% percentile-bootstrap interval; None without values.

    Args:
      values: finite numbers, each from its own prompt (repeats of one prompt are not independent).

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    data = np.asarray(values, np.float64)
    if not data.size:
        return None
    low = high = None
    if data.size >= FEWEST_FOR_INTERVAL:
        from scipy.stats import bootstrap  # takes 0.5 s, for which no other command should wait

        found = bootstrap(
            (data,), np.median, n_resamples=RESAMPLES, method="percentile", rng=SEED
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Estimate(median=float(np.median(data)), low=low, high=high, count=data.size)


def estimate_of(values: Sequence[float]) -> Estimate:
    """`median_interval` of one value or more."""
    estimate = median_interval(values)
    assert estimate is not None
    return estimate


def ratio_interval(values: Sequence[float | None], base: Sequence[float | None]) -> Estimate | None:
    """The median of value / base with its interval, over the pairs that have both numbers.

    Whole pairs are resampled.
    """
    pairs = zip(values, base, strict=True)
    return median_interval([value / other for value, other in pairs if value and other])
