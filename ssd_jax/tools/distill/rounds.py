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

from ssd_jax.speculation.fan_out import After
from ssd_jax.speculation.power_law import Ranks, exponent

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
    sizes = np.array([len(text) for text in chances])
    width = int(sizes.max(initial=1)) + k + 1
    a = np.zeros((len(chances), width))
    for row, text in enumerate(chances):
        a[row, : len(text)] = text
    inside = np.arange(width) < sizes[:, None]
    starts = np.zeros((2, len(chances), width))  # of K tokens, and of the tail's
    starts[1, :, 0] = 1.0
    corrected, added = np.zeros((2, len(chances), width))
    judged, accepted = np.zeros((2, k))
    count = 0.0
    for pending in range(width - k - 2):
        continues = inside[:, pending + 1]  # the text goes on behind the pending token
        for group_starts, length in zip(starts, (k, k if tail is None else tail), strict=True):
            mass = group_starts[:, pending] * continues
            count += float(mass.sum())
            for offset in range(length):
                position = pending + offset + 1
                accepted_mass = mass * a[:, position]
                judged[offset] += (mass * inside[:, position]).sum()
                accepted[offset] += accepted_mass.sum()
                starts[0, :, position] += mass - accepted_mass
                corrected[:, position] += mass - accepted_mass
                mass = accepted_mass
            starts[1, :, pending + length + 1] += mass
            added[:, pending + length + 1] += mass
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
      single_miss, r: of the power law.
    """

    by_length: tuple[tuple[float, ...], ...]
    single_miss: float
    r: float

    def rates(self, length: int, after: After) -> list[float]:
        """The rates of places 1..L, the same after hits and misses, which are drafted alike."""
        del after
        return list(self.by_length[length - 1]) if length else []


def power_law(rounds: Rounds, ranks: Sequence[np.ndarray], *, greedy: bool) -> tuple[float, float]:
    """c and r of the power law: F prepared bonus tokens miss with chance c F^-r.

    The draft's likeliest tokens are prepared, except the rejected proposal. That one is known for
    greedy text only: it was the likeliest. For sampled text none is left out, so that its misses
    are somewhat overstated.

    Args:
      ranks: for each text [n], see `DraftFigures.rank`.
    """
    padded_ranks = np.full(rounds.added.shape, _MOST_PREPARED)
    for row, text_ranks in enumerate(ranks):
        padded_ranks[row, : len(text_ranks)] = np.minimum(text_ranks, _MOST_PREPARED)
    after_rejection = np.maximum(padded_ranks - 1, 0) if greedy else padded_ranks
    weights = np.zeros(_MOST_PREPARED + 1)
    np.add.at(weights, after_rejection, rounds.corrected)
    np.add.at(weights, padded_ranks, rounds.added)
    observed, counts = Ranks(), np.rint(weights).astype(int)
    for rank in range(_MOST_PREPARED):
        observed.lookups[rank] = int(counts[rank:].sum())
        observed.hits[rank] = int(counts[rank])
    r = exponent(observed)
    total = float(weights.sum())
    if not total:
        return 1.0, r
    misses = sum(float(weights[count:].sum()) / total for count in _TYPICAL)
    return min(misses / sum(count**-r for count in _TYPICAL), 1.0), r
