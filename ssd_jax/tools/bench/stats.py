"""Medians, rates and their paired ratios, with bootstrap intervals."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

RESAMPLES = 5000
SEED = 0
FEWEST_FOR_INTERVAL = 6
"""The median lies between the least and the greatest of n values with probability 1 - 2^(1-n):
below six values, no interval made of them covers it with 95%."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Estimate:
    """A figure of `count` values, such as their median, and its 95% interval.

    There is no interval below six values.
    """

    value: float
    low: float | None
    high: float | None
    count: int


class Rate(NamedTuple):
    """A number of events, and the seconds that they took."""

    events: float
    seconds: float


def median_interval(values: Sequence[float]) -> Estimate | None:
    """The median with its 95% interval; None without values.

    Args:
      values: finite numbers, each from its own prompt (repeats of one prompt are not independent).
    """
    return _estimate([values], np.median) if len(values) else None


def estimate_of(values: Sequence[float]) -> Estimate:
    """`median_interval` of one value or more."""
    estimate = median_interval(values)
    assert estimate is not None
    return estimate


def rate_interval(rates: Sequence[Rate]) -> Estimate | None:
    """All events over all seconds, with the 95% interval; None without any time."""
    if not sum(rate.seconds for rate in rates):
        return None
    return _estimate([*zip(*rates, strict=True)], _rate)


def rate_ratio_interval(rates: Sequence[Rate], base: Sequence[Rate]) -> Estimate | None:
    """The quotient of two `rate_interval`, with its own interval; None where one is 0 or unknown.

    Pairs, one of each prompt, are resampled as wholes.
    """
    if not all(
        sum(rate.events for rate in side) and sum(rate.seconds for rate in side)
        for side in (rates, base)
    ):
        return None

    def ratio(*arrays: np.ndarray, axis: int) -> np.ndarray:
        return _rate(*arrays[:2], axis=axis) / _rate(*arrays[2:], axis=axis)

    return _estimate([*zip(*rates, strict=True), *zip(*base, strict=True)], ratio)


def _rate(events: np.ndarray, seconds: np.ndarray, *, axis: int) -> np.ndarray:
    return np.sum(events, axis) / np.sum(seconds, axis)


def _estimate(values: Sequence[Sequence[float]], statistic: Callable[..., np.ndarray]) -> Estimate:
    """A statistic of arrays of equal length, with its 95% percentile-bootstrap interval.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap (1993), section 13.3.
    """
    data = [np.asarray(column, np.float64) for column in values]
    count, low, high = data[0].size, None, None
    if count >= FEWEST_FOR_INTERVAL:
        from scipy.stats import bootstrap  # takes 0.5 s, for which no other command should wait

        interval = bootstrap(
            data, statistic, n_resamples=RESAMPLES, method="percentile", paired=True, rng=SEED
        ).confidence_interval
        low, high = float(interval.low), float(interval.high)
    return Estimate(value=float(statistic(*data, axis=0)), low=low, high=high, count=count)
