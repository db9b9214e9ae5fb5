"""Fan-out: how many bonus tokens are prepared for each number k of accepted tokens.

While L proposed tokens are being verified, the draft may start M branches, one for each outcome
(k, t*) that it prepares for. A policy divides M into F_0..F_L. F_L is at least 1: that slot also
carries the last proposed token. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

After = Literal["hit", "miss"]
"""Where the tokens being verified came from: a prepared branch, or a backup or nothing."""

LEAST_BUDGET = 2
"""Branches a sequence needs: one for k = L, and one for anything else."""

FIRST_GUESS, WEIGHT = 0.8, 8.0
"""The acceptance rate before anything is known, and the number of tokens that it is worth."""

_LIMITS = (0.01, 0.99)


class VerificationStats(NamedTuple):
    """What became of a verification.

    Attributes:
      accepted: proposed tokens that were kept, k.
      length: proposed tokens, L.
      after: where they came from.
      prepared: bonus tokens that were prepared for this k; 0 where nothing is known of them.
      rank: place of the bonus token among those, from 0; None where it is none of them.
      confidence: see `FanOut.counts`.
    """

    accepted: int
    length: int
    after: After
    prepared: int = 0
    rank: int | None = None
    confidence: Sequence[int] = ()


class FanOut(Protocol):
    """A policy of one sequence, so that its text depends on no other.

    It may look at anything but noise and the tokens that a branch will propose.

    Attributes:
      reads_confidence: whether it looks at the draft's confidence in the proposed tokens.
    """

    reads_confidence: ClassVar[bool]

    def counts(
        self, length: int, budget: int, after: After, confidence: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """F_0..F_L: they sum to `budget`, F_L >= 1, the others may be 0.

        Args:
          length: L in 0..K, proposed tokens that are being verified.
          budget: M, at least 1.
          after: where those tokens came from.
          confidence: the draft's in each of them, as a class of `confidence.EDGES`; empty where
            nothing is known of it, and where branches are planned before the tokens are drawn.
        """
        ...

    def observe(self, verified: VerificationStats) -> None:
        """Learns from a verification of this sequence."""
        ...


@dataclasses.dataclass(frozen=True)
class UniformFanOut:
    """The same for every k; what does not divide goes to the smallest k."""

    reads_confidence: ClassVar[bool] = False

    def counts(
        self, length: int, budget: int, after: After, confidence: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        return divide([1.0] * (length + 1), budget)

    def observe(self, verified: VerificationStats) -> None:
        """See `FanOut.observe`; there is nothing to learn."""


@dataclasses.dataclass(frozen=True)
class ListedFanOut:
    """What the user says. With L < K, F_k is kept for k < L and the rest goes to k = L.

    With a budget other than the lists' sum, in proportion to them.

    Attributes:
      hit, miss: K + 1 counts each, the last one at least 1.
    """

    reads_confidence: ClassVar[bool] = False

    hit: tuple[int, ...]
    miss: tuple[int, ...]

    def counts(
        self, length: int, budget: int, after: After, confidence: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        listed = self.hit if after == "hit" else self.miss
        return divide([*listed[:length], sum(listed[length:])], budget)

    def observe(self, verified: VerificationStats) -> None:
        """See `FanOut.observe`; there is nothing to learn."""


class GeometricFanOut:
    """F_k proportional to P(k)^(1/(1+r)), where each token is accepted with the same probability a.

    With P(k) = a^k (1-a) for k < L and P(L) = a^L this is Theorem 12 of the paper:
    F_k = F_0 a^(k/(1+r)) and F_L = F_0 a^(L/(1+r)) (1-a)^(-1/(1+r)). It is the least sum of
    P(k) F_k^-r, the chance of a miss under the paper's power law. a is learned as verifications
    come in, apart for tokens that the draft prepared and for those that it did not.

    Args:
      acceptance: a before anything was observed.
      r: exponent of the power law.
    """

    reads_confidence: ClassVar[bool] = False

    def __init__(self, *, acceptance: float = FIRST_GUESS, r: float = 1.0) -> None:
        self._r = r
        self._accepted: dict[After, float] = dict.fromkeys(("hit", "miss"), acceptance * WEIGHT)
        self._judged: dict[After, float] = dict.fromkeys(("hit", "miss"), WEIGHT)

    def acceptance(self, after: After) -> float:
        """The estimate of a, within [.01, .99]."""
        return rate(self._accepted[after], self._judged[after])

    def counts(
        self, length: int, budget: int, after: After, confidence: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """See `FanOut.counts`."""
        chances = odds([self.acceptance(after)] * length)
        return divide([p ** (1 / (1 + self._r)) for p in chances], budget)

    def observe(self, verified: VerificationStats) -> None:
        """See `FanOut.observe`; tokens after the first rejected one were not judged."""
        accepted, length, after, *_ = verified
        self._accepted[after] += accepted
        self._judged[after] += min(accepted + 1, length)


def rate(accepted: float, judged: float) -> float:
    """An acceptance rate, within [.01, .99]."""
    low, high = _LIMITS
    return min(max(accepted / judged, low), high)


def odds(rates: Sequence[float]) -> list[float]:
    """P(k) for k = 0..L, if token i, once it is judged, is accepted with rates[i - 1]."""
    found, reached = [], 1.0
    for a in rates:
        found.append(reached * (1 - a))
        reached *= a
    return [*found, reached]


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
    """`share`, with at least 1 for the last."""
    counts = share(weights, budget)
    return counts if counts[-1] else (*share(weights[:-1], budget - 1), 1)
