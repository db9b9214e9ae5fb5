"""Fan-out by confidence: outcomes scored by how sure the draft was of the very tokens it proposed.

A token that the draft gave much probability is likely to be accepted. With a(q) the acceptance
rate of tokens of probability q, and rho(rank) the share of bonus tokens that have this rank,

    score(k, rank) = a(q_1) .. a(q_k) (1 - a(q_{k+1})) rho(rank)      for k < L
    score(L, rank) = a(q_1) .. a(q_L) rho_L(rank)

and the M best outcomes get a branch. q is the draft's before Saguaro sampling. Pure host code.
"""

from __future__ import annotations

from collections import Counter
from typing import ClassVar

from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.speculation.acceptance import FIRST_GUESS, WEIGHT, AcceptanceEstimator, odds, weighed
from ssd_jax.speculation.fan_out import (
    After,
    Classes,
    Counts,
    FanOut,
    MeasuredFanOut,
    Ranks,
    VerificationStats,
)

_GUESSES = (0.35, 0.45, 0.55, 0.65, 0.75, 0.84, 0.91, 0.97)  # of a(q), for each class


class ConfidenceFanOut(FanOut):
    """See the module. a and rho are learned in few classes, from guesses that are soon outweighed.

    Where the confidence in a token is not known, and to plan with before tokens are drawn, outcomes
    count as measured.

    Args:
      acceptance: the rate before anything was observed, for what is measured.
      weight: how many observations each guess is worth.
    """

    reads_confidence: ClassVar[bool] = True

    def __init__(self, *, acceptance: float = FIRST_GUESS, weight: float = WEIGHT) -> None:
        self._measured = MeasuredFanOut(acceptance=acceptance, weight=weight)
        self._weight = weight / 2  # one guess a class
        self._by_class = AcceptanceEstimator(weight=self._weight)
        self._before_last, self._last = Ranks(), Ranks()

    def acceptance(self, confidence: int) -> float:
        """a(q) of a class, within [.01, .99]."""
        return self._by_class.rate(confidence, _GUESSES[confidence])

    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        """See `FanOut.counts`."""
        own = confidence[:length]
        if len(own) < length or UNKNOWN in own:
            return self._measured.counts(length, budget, after)
        chances = odds([self.acceptance(each) for each in own])
        shares = [self._shares(self._before_last, budget), self._shares(self._last, budget)]
        scores = [
            (-chance * share, k)
            for k, chance in enumerate(chances)
            for rank, share in enumerate(shares[k == length])
            if rank or k < length  # k = L has its first branch anyway
        ]
        best = Counter(k for _, k in sorted(scores)[: budget - 1])
        best[length] += 1
        return tuple(best[k] for k in range(length + 1))

    def observe(self, verified: VerificationStats) -> None:
        """See `FanOut.observe`."""
        self._measured.observe(verified)
        accepted, length, _, prepared, rank, confidence = verified
        (self._last if accepted == length else self._before_last).observe(prepared, rank)
        self._by_class.observe(accepted, confidence[:length])

    def _shares(self, ranks: Ranks, count: int) -> list[float]:
        """rho of `count` ranks; it never rises. The guess is 1/2, 1/6, 1/12 and so on."""
        shares, left, most = [], 1.0, 1.0
        for rank in range(count):
            guess = 1 / (rank + 2)  # of those that no earlier rank had
            found = weighed(ranks.found[rank], ranks.looked[rank], guess, self._weight)
            most = min(most, left * found)
            shares.append(most)
            left *= 1 - found
        return shares
