"""Acceptance: the estimator that all policies share, and statistics of a sequence's rounds.

Pure host code.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Sequence
from itertools import accumulate
from operator import mul
from statistics import fmean

FIRST_GUESS, WEIGHT = 0.8, 8.0
"""The acceptance rate before anything is known, and its weight in judged tokens."""

_LIMITS = (0.01, 0.99)
_MEMORY = 32  # rounds


class AcceptanceEstimator:
    """Counts of proposed tokens by a key: their place, where they came from, their confidence.

    Args:
      guess: the rate before anything was observed.
      weight: number of judged tokens that a guess is worth.

    Attributes:
      accepted, judged: tokens by key.
    """

    def __init__(self, *, guess: float = FIRST_GUESS, weight: float = WEIGHT) -> None:
        self._guess, self._weight = guess, weight
        self.accepted: Counter[Hashable] = Counter()
        self.judged: Counter[Hashable] = Counter()

    def observe(self, accepted: int, keys: Sequence[Hashable]) -> None:
        """Counts a verification; tokens after the first rejected one were not judged.

        Args:
          accepted: k.
          keys: of the proposed tokens, in order; fewer than L if only those are known.
        """
        self.accepted.update(keys[:accepted])
        self.judged.update(keys[: accepted + 1])

    @property
    def average(self) -> float:
        """The rate of all tokens together, without limits."""
        return smoothed(self.accepted.total(), self.judged.total(), self._guess, self._weight)

    def rate(self, key: Hashable, guess: float | None = None) -> float:
        """The acceptance rate of judged tokens of a key, within [.01, .99].

        Args:
          key: of the tokens.
          guess: for this key; None is the guess for all keys.
        """
        guess, (low, high) = self._guess if guess is None else guess, _LIMITS
        rate = smoothed(self.accepted[key], self.judged[key], guess, self._weight)
        return min(max(rate, low), high)


def smoothed(count: float, total: float, guess: float, weight: float = WEIGHT) -> float:
    """The share `count` / `total`, smoothed by a guess that is worth `weight` observations."""
    return (count + weight * guess) / (total + weight)


def odds(rates: Sequence[float]) -> list[float]:
    """P(k) for k = 0..L, if token i, once it is judged, is accepted with rates[i - 1]."""
    chances, reached = [], 1.0
    for a in rates:
        chances.append(reached * (1 - a))
        reached *= a
    return [*chances, reached]


class AcceptanceStats:
    """Statistics of the rounds of one sequence.

    They belong to one sequence alone: where lengths do not depend on time, two requests with the
    same seed and index share their noise, and lengths chosen by what it did to one would bias the
    other.
    """

    def __init__(self) -> None:
        self._acceptance, self._by_class = AcceptanceEstimator(), AcceptanceEstimator()
        self._rounds: deque[int] = deque(maxlen=_MEMORY)
        self._after_hit: deque[int] = deque(maxlen=_MEMORY)
        self._after_miss: deque[int] = deque(maxlen=_MEMORY)
        self._was_prepared = {empty: deque([True], maxlen=_MEMORY) for empty in (True, False)}

    def observe(self, accepted: int, length: int, confidence: Sequence[int] = ()) -> None:
        """Counts a verification of L tokens; all places share one acceptance rate.

        Args:
          confidence: in the tokens, as far as it is known; see `sampling.confidence`.
        """
        self._acceptance.observe(accepted, [None] * length)
        self._by_class.observe(accepted, confidence[:length])

    def round(self, tokens: int, *, hit: bool, empty: bool, prepared: bool) -> None:
        """Counts a round.

        Args:
          tokens: number of tokens that it committed.
          hit: whether its proposal was a branch.
          empty: whether it had no proposal, so that all branches were for one token.
          prepared: whether there was a branch for its outcome.
        """
        self._rounds.append(tokens)
        (self._after_hit if hit else self._after_miss).append(tokens)
        self._was_prepared[empty].append(prepared)

    def tokens(self, length: int, confidence: Sequence[int] = ()) -> float:
        """Expected tokens of a round with `length` proposed ones, bonus included: 1 + a_1 + ...

        Args:
          confidence: in the first of them, which then have the rates of their classes.
        """
        a = self._acceptance.rate(None)
        rates = [self._by_class.rate(known, a) for known in confidence[:length]]
        return 1 + sum(accumulate([*rates, *[a] * (length - len(rates))], mul))

    def usual(self, length: int) -> float:
        """Mean tokens of recent rounds; before the first, those expected of `length` proposed."""
        return fmean(self._rounds) if self._rounds else self.tokens(length)

    def next_round(self, *, empty: bool) -> float:
        """Tokens that the next round is expected to gain by a hit.

        `empty`: whether the round before it verifies nothing.
        """
        if not self._after_hit or not self._after_miss:
            return 0.0
        gain = fmean(self._after_hit) - fmean(self._after_miss)
        return max(gain, 0.0) * fmean(self._was_prepared[empty])
