"""How unlikely counts are under a law, by a bound that holds at every sample size."""

from __future__ import annotations

import numpy as np

ALPHA = 1e-10  # of one test; all tests of the code, the slow ones included, are fewer than 2,000


def p_value(counts: np.ndarray, law: np.ndarray) -> float:
    """An upper bound of the probability of counts this far from a law, of the same shape.

    Chernoff-Hoeffding: P(a cell's share is at least as extreme as c) <= exp(-n KL(c || p)), on
    each side of each cell. It holds for any n and any p, so small alphas mean what they say, and
    one count where p = 0 gives 0.
    """
    n = counts.sum()
    share = counts.ravel() / n
    law = law.ravel()
    distance = np.max(_divergence(share, law))
    return float(min(1.0, 2 * law.size * np.exp(-n * distance)))


def least_shift(rows: int, cells: int, probability: float) -> float:
    """How far the share of a cell must be from its probability to be taken for another law."""
    low, high = 0.0, 1.0 - probability
    for _ in range(60):
        middle = (low + high) / 2
        share, law = np.array([probability + middle]), np.array([probability])
        far = rows * _divergence(share, law)[0] > np.log(2 * cells / ALPHA)
        low, high = (low, middle) if far else (middle, high)
    return high


def _divergence(share: np.ndarray, law: np.ndarray) -> np.ndarray:
    """KL divergence of Bernoulli laws with parameters `share` and `law`."""

    def part(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        with np.errstate(divide="ignore", invalid="ignore"):
            return np.where(a > 0, a * np.log(a / b), 0.0)

    # A law that sums to one only within rounding may exceed one.
    return part(share, law) + part(1 - share, np.clip(1 - law, 0, 1))
