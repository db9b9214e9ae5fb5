"""Fan-out: how many bonus tokens are prepared for each number k of accepted tokens.

While L proposed tokens are being verified, the draft may start M branches, one for each outcome
(k, t*) that it prepares for. A policy divides M into F_0..F_L. F_L is at least 1: the first branch
of k = L also runs the last proposed token. Pure host code.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, Protocol

from typing_extensions import override

from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.speculation.acceptance import FIRST_GUESS, WEIGHT, AcceptanceEstimator, odds, smoothed
from ssd_jax.speculation.power_law import Ranks, by_power_law, divide, exponent

After = Literal["hit", "miss"]
"""Source of the tokens being verified: a prepared branch ("hit"); a backup or nothing ("miss")."""

Counts = tuple[int, ...]
"""F_0..F_L."""

Classes = Sequence[int]
"""The draft's confidence in each proposed token (`sampling.confidence`); empty if unknown."""

LEAST_BUDGET = 2
"""Least branches a sequence needs: one for k = L, and one for anything else."""

_GUESSES = (0.35, 0.45, 0.55, 0.65, 0.75, 0.84, 0.91, 0.97)  # of a(q), for each class


class VerificationStats(NamedTuple):
    """The result of a verification, as policies and tuners observe it.

    Attributes:
      accepted: number of accepted tokens, k.
      length: number of proposed tokens, L.
      after: where the proposed tokens came from.
      prepared: number of bonus tokens prepared for this k; 0 where nothing is known of them.
      rank: place of the bonus token among the prepared ones, from 0; None if it is none of them.
      confidence: see `FanOut.counts`.
    """

    accepted: int
    length: int
    after: After
    prepared: int = 0
    rank: int | None = None
    confidence: Classes = ()


class FanOut(Protocol):
    """A policy of one sequence alone, so that its text depends on no other sequence.

    It may use anything but noise and the tokens that a branch will propose.

    Attributes:
      reads_confidence: whether it uses the draft's confidence in the proposed tokens.
    """

    reads_confidence: ClassVar[bool] = False

    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        """F_0..F_L: they sum to `budget`, F_L >= 1, the others may be 0.

        Args:
          length: L in 0..K, proposed tokens that are being verified.
          budget: M, at least 1.
          after: where those tokens came from.
          confidence: in each of them; also empty where branches are planned before the tokens are
            drawn.
        """
        ...

    def observe(self, verified: VerificationStats) -> None:
        """Learns from a verification of this sequence, if there is anything to learn."""


FanOutFactory = Callable[[], FanOut]
"""Makes the policy of a sequence."""


class UniformFanOut(FanOut):
    """The same number for every k; the remainder goes to the smallest k."""

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        return divide([1.0] * (length + 1), budget)


@dataclasses.dataclass(frozen=True)
class ListedFanOut(FanOut):
    """The user's lists. With L < K, F_k is kept for k < L and the rest goes to k = L.

    A budget other than a list's sum is divided in proportion to the list.

    Attributes:
      hit, miss: K + 1 counts each, the last one at least 1.
    """

    hit: Counts
    miss: Counts

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        listed = self.hit if after == "hit" else self.miss
        return divide([*listed[:length], sum(listed[length:])], budget)


class GeometricFanOut(FanOut):
    """F_k proportional to P(k)^(1/(1+r)), where each token is accepted with the same probability a.

    With P(k) = a^k (1-a) for k < L and P(L) = a^L this is Theorem 12 of the paper:
    F_k = F_0 a^(k/(1+r)) and F_L = F_0 a^(L/(1+r)) (1-a)^(-1/(1+r)). It minimises the sum of
    P(k) F_k^-r, the chance of a miss under the paper's power law. a is learned from verifications,
    separately for tokens that the draft prepared and for those that it did not.

    Args:
      acceptance: a before anything was observed.
      r: exponent of the power law.
    """

    def __init__(self, *, acceptance: float = FIRST_GUESS, r: float = 1.0) -> None:
        self._r, self._acceptance = r, AcceptanceEstimator(guess=acceptance)

    def acceptance(self, after: After) -> float:
        """The estimate of a, within [.01, .99]."""
        return self._acceptance.rate(after)

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        return by_power_law(odds([self.acceptance(after)] * length), self._r, budget)

    @override
    def observe(self, verified: VerificationStats) -> None:
        self._acceptance.observe(verified.accepted, [verified.after] * verified.length)


class MeasuredFanOut(FanOut):
    """F_k proportional to P(k)^(1/(1+r)), with P and r as observed.

    Theorem 12 without its two assumptions, that every token is accepted with the same probability
    and that r is known. P(k) comes from how often the token of each place was accepted once it was
    judged: records of any length are measured together, and P(k) is right for every L. A place with
    few observations is taken for an average one. Rates are learned separately after hits and after
    misses; the ranks of bonus tokens are learned together.

    Args:
      acceptance, r: the rate and the exponent before anything was observed.
      weight: number of observations that each guess is worth.
    """

    def __init__(
        self, *, acceptance: float = FIRST_GUESS, r: float = 1.0, weight: float = WEIGHT
    ) -> None:
        kinds: tuple[After, ...] = ("hit", "miss")
        self._by_place = {
            after: AcceptanceEstimator(guess=acceptance, weight=weight) for after in kinds
        }
        self._ranks, self._guess, self._weight = Ranks(), r, weight
        self._r: float | None = None  # of `_ranks`, once worked out

    @property
    def r(self) -> float:
        """The exponent of the miss rate."""
        if self._r is None:
            self._r = exponent(self._ranks, self._guess, weight=self._weight)
        return self._r

    def rates(self, length: int, after: After) -> list[float]:
        """How often the tokens of places 1..L are accepted, each once it is judged."""
        by_place = self._by_place[after]
        average = by_place.average
        return [by_place.rate(place, average) for place in range(length)]

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        return by_power_law(odds(self.rates(length, after)), self.r, budget)

    @override
    def observe(self, verified: VerificationStats) -> None:
        self._by_place[verified.after].observe(verified.accepted, range(verified.length))
        self._ranks.observe(verified.prepared, verified.rank)
        self._r = None


class ConfidenceFanOut(FanOut):
    """Scores outcomes by the draft's confidence in the tokens that it proposed.

    A token to which the draft gave a high probability is likely to be accepted. With a(q) the
    acceptance rate of tokens of probability q, and rho(rank) the share of bonus tokens with this
    rank,

        score(k, rank) = a(q_1) .. a(q_k) (1 - a(q_{k+1})) rho(rank)      for k < L
        score(L, rank) = a(q_1) .. a(q_L) rho_L(rank)

    and the M best outcomes get a branch. q is the draft's before Saguaro sampling; where draft and
    target share their noise, classes are not of q alone (`sampling.confidence`). a and rho are
    learned in few classes, from guesses that are soon outweighed.

    Where the confidence in a token is not known, and to plan before tokens are drawn, the policy is
    that of `MeasuredFanOut`.

    Args:
      acceptance: the rate before anything was observed, for `MeasuredFanOut`.
      weight: number of observations that each guess is worth.
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

    @override
    def counts(self, length: int, budget: int, after: After, confidence: Classes = ()) -> Counts:
        known = confidence[:length]
        if len(known) < length or UNKNOWN in known:
            return self._measured.counts(length, budget, after)
        chances = odds([self.acceptance(q_class) for q_class in known])
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

    @override
    def observe(self, verified: VerificationStats) -> None:
        self._measured.observe(verified)
        accepted, length, _, prepared, rank, confidence = verified
        (self._last if accepted == length else self._before_last).observe(prepared, rank)
        self._by_class.observe(accepted, confidence[:length])

    def _shares(self, ranks: Ranks, count: int) -> list[float]:
        """rho of `count` ranks; it never rises. The guesses are 1/2, 1/6, 1/12 and so on."""
        shares, remaining, share = [], 1.0, 1.0
        for rank in range(count):
            guess = 1 / (rank + 2)  # of bonus tokens that no earlier rank had
            rate = smoothed(ranks.hits[rank], ranks.lookups[rank], guess, self._weight)
            share = min(share, remaining * rate)
            shares.append(share)
            remaining *= 1 - rate
        return shares
