"""Medians, percentiles, pairs, and bootstrap intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import TypeVar

import numpy as np

Key = TypeVar("Key", bound=Hashable)

RESAMPLES = 5000
SEED = 0
FEWEST_FOR_INTERVAL = 6
"""Between the least and the greatest of n values lies the median with probability 1 - 2^(1-n):
below six values nothing made of them covers it with 95%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A median of `count` values and its 95% interval; no interval below six values."""

    median: float
    low: float | None
    high: float | None
    count: int


def median_interval(values: Sequence[float], *, seed: int = SEED) -> Estimate | None:
    """The median with its 95% percentile-bootstrap interval; None without values.

    Args:
      values: finite numbers, each from its own prompt (repeats of one prompt are not independent).
      seed: of the resampling; the same values and seed give the same interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    data = np.asarray(values, np.float64)
    if not data.size:
        return None
    low = high = None
    if data.size >= FEWEST_FOR_INTERVAL:
        from scipy.stats import bootstrap  # 0.5 s, which no other command should wait for

        found = bootstrap(
            (data,), np.median, n_resamples=RESAMPLES, method="percentile", rng=seed
        ).confidence_interval
        low, high = float(found.low), float(found.high)
    return Estimate(median=float(np.median(data)), low=low, high=high, count=data.size)


def ratio_interval(values: Sequence[float], base: Sequence[float]) -> Estimate | None:
    """The median of values[i] / base[i] with its interval; whole pairs are resampled.

    Raises:
      ValueError: lists of different lengths, or a base that is not positive.
    """
    if len(values) != len(base):
        raise ValueError(f"{len(values)} values do not pair with {len(base)}")
    if any(divisor <= 0 for divisor in base):
        raise ValueError("a ratio needs a positive base")
    return median_interval([value / divisor for value, divisor in zip(values, base, strict=True)])


def paired(
    values: Mapping[Key, float | None], base: Mapping[Key, float | None]
) -> tuple[list[float], list[float]]:
    """The numbers that both have under the same key, in the order of `values`."""
    both = [
        (value, other)
        for key, value in values.items()
        if value is not None and (other := base.get(key)) is not None
    ]
    return [value for value, _ in both], [other for _, other in both]


def percentiles(values: Sequence[float], percents: Sequence[float]) -> list[float] | None:
    """Percentiles with linear interpolation; None without values."""
    if not len(values):
        return None
    return [float(value) for value in np.percentile(np.asarray(values, np.float64), percents)]
