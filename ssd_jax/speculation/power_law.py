"""Theorem 12 of the paper: a budget divided where F prepared bonus tokens miss with F^-r.

Pure host code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence

from ssd_jax.speculation.acceptance import WEIGHT

_LEAST, _MOST = 0.3, 3.0  # r
_HALVINGS = 12


class Ranks:
    """Places of bonus tokens among the prepared ones.

    Attributes:
      lookups, hits: by place, from 0: how often a token was prepared at this place and the bonus
        token was at no place before; and how often it was at this place.
    """

    def __init__(self) -> None:
        self.lookups: Counter[int] = Counter()
        self.hits: Counter[int] = Counter()

    def observe(self, prepared: int, rank: int | None) -> None:
        """Counts one look-up; see `fan_out.VerificationStats`."""
        self.lookups.update(range(prepared if rank is None else rank + 1))
        if rank is not None:
            self.hits[rank] += 1


def exponent(ranks: Ranks, guess: float = 1.0, *, weight: float = WEIGHT) -> float:
    """r of the power law, within [.3, 3]: F prepared bonus tokens miss with probability F^-r.

    The law holds up to a constant factor, the probability that one prepared token misses, on which
    fan-outs do not depend. So r is the likeliest exponent for the places behind the first, where
    the bonus token passes place F - 1 with probability ((F - 1) / F)^r. `weight` look-ups that
    agree with r = `guess` are counted beforehand.
    """
    observations: list[tuple[int, float, float]] = [(1, weight, weight * (1 - 2**-guess))]
    observations += [(place, n, ranks.hits[place]) for place, n in ranks.lookups.items() if place]
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (middle, high) if _slope(observations, middle) > 0 else (low, middle)
    return (low + high) / 2


def _slope(observations: Iterable[tuple[int, float, float]], r: float) -> float:
    """Derivative by r of the log-likelihood; it falls as r rises."""
    total = 0.0
    for place, lookups, hits in observations:
        passed = (place / (place + 1)) ** r
        gained = hits * passed / (1 - passed) - (lookups - hits)
        total += gained * math.log((place + 1) / place)
    return total


def by_power_law(chances: Sequence[float], r: float, budget: int) -> tuple[int, ...]:
    """F_k proportional to P(k)^(1/(1+r)): Theorem 12 for any P."""
    return divide([p ** (1 / (1 + r)) for p in chances], budget)


def share(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Divides `total` in proportion to the weights, by largest remainder.

    Of equal remainders the first wins, so larger weights never get less.

    Args:
      weights: none negative, not all 0.
    """
    scale = total / sum(weights)
    quotas = [weight * scale for weight in weights]
    counts = [int(quota) for quota in quotas]
    by_remainder = sorted(range(len(quotas)), key=lambda i: counts[i] - quotas[i])
    for i in by_remainder[: total - sum(counts)]:
        counts[i] += 1
    return tuple(counts)


def divide(weights: Sequence[float], budget: int) -> tuple[int, ...]:
    """Divides `budget` as `share` does, with at least 1 for the last weight."""
    counts = share(weights, budget)
    return counts if counts[-1] else (*share(weights[:-1], budget - 1), 1)
