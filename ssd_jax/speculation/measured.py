"""Fan-out by measured outcomes: F_k proportional to P(k)^(1/(1+r)), with P and r as observed.

Theorem 12 of the paper without its two assumptions, that every token is accepted with the same
probability and that r is known. Pure host code.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ssd_jax.speculation.acceptance import FIRST_GUESS, WEIGHT, AcceptanceEstimator, odds
from ssd_jax.speculation.fan_out import (
    After,
    Classes,
    Counts,
    FanOut,
    VerificationStats,
    by_power_law,
)

_LEAST, _MOST = 0.3, 3.0  # r
_HALVINGS = 12


class Ranks:
    """Where bonus tokens were found among those prepared for them.

    Attributes:
      looked, found: by place, from 0: how often a bonus token was not at any place before, though
        this place had one prepared; and how often it was this one.
    """

    def __init__(self) -> None:
        self.looked: Counter[int] = Counter()
        self.found: Counter[int] = Counter()

    def observe(self, prepared: int, rank: int | None) -> None:
        """Takes one look-up; see `VerificationStats`."""
        self.looked.update(range(prepared if rank is None else rank + 1))
        if rank is not None:
            self.found[rank] += 1


def exponent(ranks: Ranks, *, weight: float = WEIGHT) -> float:
    """r of the power law, within [.3, 3]: F prepared bonus tokens miss with probability F^-r.

    Up to a constant factor, which is how often one of them misses: fan-outs do not depend on it. So
    r is the likeliest exponent of what comes behind the first place, where the bonus token passes
    place F - 1 with probability ((F - 1) / F)^r. A few look-ups (`weight`) that agree with r = 1 go
    before.
    """
    seen = [(1, weight, weight / 2)]  # (1/2)^1 misses
    seen += [
        (place, float(looked), float(ranks.found[place]))
        for place, looked in ranks.looked.items()
        if place
    ]
    low, high = _LEAST, _MOST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _slope(seen, middle) > 0:
            low = middle
        else:
            high = middle
    return (low + high) / 2


def _slope(seen: Iterable[tuple[int, float, float]], r: float) -> float:
    """Derivative by r of the log-likelihood; it falls as r rises."""
    total = 0.0
    for place, looked, found in seen:
        passed = (place / (place + 1)) ** r
        gained = found * passed / (1 - passed) - (looked - found)
        total += gained * math.log((place + 1) / place)
    return total


class MeasuredFanOut(FanOut):
    """See the module. P(k) comes from how often the token of each place was accepted.

    Given that it was judged: so records of any length are measured together, and P(k) is right for
    every L. A place of which little is known is taken for an average one. Hits and misses are
    learned apart; what ranks are found at is learned together.

    Args:
      acceptance: the rate before anything was observed.
      weight: how many observations each guess is worth.
    """

    def __init__(self, *, acceptance: float = FIRST_GUESS, weight: float = WEIGHT) -> None:
        kinds: tuple[After, ...] = ("hit", "miss")
        self._by_place = {
            after: AcceptanceEstimator(guess=acceptance, weight=weight) for after in kinds
        }
        self._ranks, self._weight = Ranks(), weight
        self._r: float | None = None  # of `_ranks`, once worked out

    @property
    def r(self) -> float:
        """The exponent of the miss rate."""
        if self._r is None:
            self._r = exponent(self._ranks, weight=self._weight)
        return self._r

    def rates(self, length: int, after: After) -> list[float]:
        """How often the tokens of places 1..L are accepted, each once it is judged."""
        by_place = self._by_place[after]
        average = by_place.average
        return [by_place.rate(place, average) for place in range(length)]

    def odds(self, length: int, after: After) -> list[float]:
        """P(k) for k = 0..L."""
        return odds(self.rates(length, after))

    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        """See `FanOut.counts`."""
        return by_power_law(self.odds(length, after), self.r, budget)

    def observe(self, verified: VerificationStats) -> None:
        """See `FanOut.observe`."""
        self._by_place[verified.after].observe(verified.accepted, range(verified.length))
        self._ranks.observe(verified.prepared, verified.rank)
        self._r = None
