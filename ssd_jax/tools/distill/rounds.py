"""How many rounds speculation takes over given texts, and how they end: exact, without a draft run.

Given the output text y, the proposals of a round are accepted independently of each other: token
y_i, if it is judged, was proposed and accepted with probability a_i. That is 0 or 1 for greedy
text, and min(1, q(y_i) / p(y_i)) for text drawn from p: the token came with p(y_i), and as an
accepted proposal with min(p, q)(y_i). So the beginnings of rounds are a Markov chain over the text,
and its expectations are sums, not samples. The first token of a text belongs to the prompt, not to
a round. What follows the end of a text is not counted. Pure NumPy.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ssd_jax.speculation.fan_out import After, Ranks, exponent

_MOST_PREPARED = 16
"""Ranks of a bonus token that are told apart."""

_TYPICAL = range(1, 5)
"""Bonus tokens that a fan-out prepares for one k; c of the power law is fitted to these."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rounds:
    """Expectations over all texts together.

    Attributes:
      committed: tokens, without each text's first.
      count: rounds.
      judged, accepted: [K] proposed tokens by place that were judged, and accepted.
      corrected, added: [texts, positions] probabilities that the token at a position came from a
        round that rejected a proposal there, and from one that accepted all its proposals.
    """

    committed: int
    count: float
    judged: np.ndarray
    accepted: np.ndarray
    corrected: np.ndarray
    added: np.ndarray

    @property
    def tokens_per_call(self) -> float:
        """Committed tokens per target forward; NaN if the texts took none."""
        return self.committed / self.count if self.count else math.nan

    @property
    def rates(self) -> tuple[float, ...]:
        """How often the token of each place is accepted, once it is judged; 0 where none was."""
        pairs = zip(self.accepted, self.judged, strict=True)
        return tuple(float(a / j) if j else 0.0 for a, j in pairs)


def walk(chances: Sequence[np.ndarray], k: int, *, tail: int | None = None) -> Rounds:
    """The rounds that proposals of K tokens take.

    Args:
      chances: for each text, a_i [n]; the first, of the token that the prompt gives, is unused.
      tail: tokens of a proposal after a round in which all were accepted, and of the first one (the
        tail rule of SSD: K - 1, and K for K = 1); None is K.
    """
    sizes = np.array([len(own) for own in chances])
    width = int(sizes.max(initial=1)) + k + 1
    a = np.zeros((len(chances), width))
    for row, own in enumerate(chances):
        a[row, : len(own)] = own
    inside = np.arange(width) < sizes[:, None]
    begins = np.zeros((2, len(chances), width))  # of K tokens, and of the tail's
    begins[1, :, 0] = 1.0
    corrected, added = np.zeros((2, len(chances), width))
    judged, accepted = np.zeros((2, k))
    count = 0.0
    for pending in range(width - k - 2):
        more = inside[:, pending + 1]  # the text goes on behind the pending token
        for begun, length in zip(begins, (k, k if tail is None else tail), strict=True):
            reached = begun[:, pending] * more
            count += float(reached.sum())
            for place in range(length):
                at = pending + place + 1
                kept = reached * a[:, at]
                judged[place] += (reached * inside[:, at]).sum()
                accepted[place] += kept.sum()
                begins[0, :, at] += reached - kept
                corrected[:, at] += reached - kept
                reached = kept
            begins[1, :, pending + length + 1] += reached
            added[:, pending + length + 1] += reached
    return Rounds(
        committed=int(np.maximum(sizes - 1, 0).sum()),
        count=count,
        judged=judged,
        accepted=accepted,
        corrected=corrected * inside,
        added=added * inside,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeasuredDraft:
    """Measurements of a draft; see `throughput.Observations`.

    Attributes:
      by_length: by L from 1, rates of the places 1..L.
      alone, r: of the power law.
    """

    by_length: tuple[tuple[float, ...], ...]
    alone: float
    r: float

    def rates(self, length: int, after: After) -> list[float]:
        """See `Observations.rates`; the same after hits and misses, drafted alike."""
        del after
        return list(self.by_length[length - 1]) if length else []


def power_law(rounds: Rounds, ranks: Sequence[np.ndarray], *, greedy: bool) -> tuple[float, float]:
    """c and r of the power law: F prepared bonus tokens miss with chance c F^-r.

    The draft's likeliest tokens are prepared, except the rejected proposal. That one is known for
    greedy text only: it was the likeliest. For sampled text none is left out, so that its misses
    are somewhat overstated.

    Args:
      ranks: for each text [n], see `Judged.rank`.
    """
    place = np.full(rounds.added.shape, _MOST_PREPARED)
    for row, own in enumerate(ranks):
        place[row, : len(own)] = np.minimum(own, _MOST_PREPARED)
    after_rejection = np.maximum(place - 1, 0) if greedy else place
    weights = np.zeros(_MOST_PREPARED + 1)
    np.add.at(weights, after_rejection, rounds.corrected)
    np.add.at(weights, place, rounds.added)
    seen, counted = Ranks(), np.rint(weights).astype(int)
    for rank in range(_MOST_PREPARED):
        seen.looked[rank] = int(counted[rank:].sum())
        seen.found[rank] = int(counted[rank])
    r = exponent(seen)
    total = float(weights.sum())
    if not total:
        return 1.0, r
    missed = sum(float(weights[count:].sum()) / total for count in _TYPICAL)
    return min(missed / sum(count**-r for count in _TYPICAL), 1.0), r
