"""Reference policies: how many branches for each number of accepted tokens, and which.

A fan-out gives L + 1 counts for a situation, the last one at least 1. A ranking may also look at
the noise that will judge the round. Nothing here imports JAX.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction

from tests.speculation.enumeration.chance import Chance, Key
from tests.speculation.enumeration.filters import Text
from tests.speculation.enumeration.rounds import Game
from tests.speculation.enumeration.ssd import (
    COLD,
    HIT,
    Counts,
    FanOut,
    Situation,
    by_law,
    by_noise,
    candidates,
)


def forced(size: int) -> FanOut:
    """The same count everywhere: the whole vocabulary makes every outcome a hit, 0 none."""
    return lambda situation: (size,) * (len(situation.record.tokens) + 1)


def uniform(budget: int) -> FanOut:
    """Equal counts; what is left over goes to k = L first, then to k = 0, 1, ..."""

    def counts(situation: Situation) -> Counts:
        slots = len(situation.record.tokens) + 1
        share, over = divmod(budget, slots)
        return (*(share + (k + 1 < over) for k in range(slots - 1)), share + (over > 0))

    return counts


def lists(after_hit: Counts, after_miss: Counts) -> FanOut:
    """Given counts, by what the last round did; a shorter record gives the rest to k = L."""

    def counts(situation: Situation) -> Counts:
        chosen = after_hit if situation.served.source in (HIT, COLD) else after_miss
        length = len(situation.record.tokens)
        return (*chosen[:length], sum(chosen[length:]))

    return counts


def geometric(budget: int, a: float, r: float) -> FanOut:
    """The capped geometric law of P(k)^(1 / (1 + r)), rounded by largest remainder; F_L >= 1."""

    def counts(situation: Situation) -> Counts:
        length = len(situation.record.tokens)
        chances = [a**k * (1 - a) for k in range(length)] + [a**length]
        weights = [chance ** (1 / (1 + r)) for chance in chances]
        shares = [budget * weight / sum(weights) for weight in weights]
        counts = [int(share) for share in shares]
        counts[-1] = max(counts[-1], 1)
        by_remainder = sorted(range(length + 1), key=lambda k: counts[k] - shares[k])
        for k in by_remainder[: budget - sum(counts)]:
            counts[k] += 1
        return tuple(counts)

    return counts


def confidence(budget: int) -> FanOut:
    """The likeliest outcomes, judged by how sure the draft was of the very tokens it proposed."""
    return lambda situation: shared(budget)([situation])[0]


def shared(budget: int) -> Callable[[list[Situation]], list[Counts]]:
    """`confidence` over all rows of a batch; every row has its first branch after L."""

    def counts(situations: list[Situation]) -> list[Counts]:
        given = [[0] * len(s.record.tokens) + [1] for s in situations]
        entries = [
            (score * RHO[rank], row, k)
            for row, situation in enumerate(situations)
            for k, score in enumerate(_scores(situation.chances))
            for rank in range(len(RHO))
            if rank or k < len(situation.record.tokens)
        ]
        entries.sort(key=lambda entry: (-entry[0], entry[1:]))
        for _, row, k in entries[: budget - len(situations)]:
            given[row][k] += 1
        return [tuple(row) for row in given]

    return counts


# The chance that a bonus token has a rank.
RHO = (Fraction(5, 9), Fraction(3, 9), Fraction(1, 9))


def _scores(chances: tuple[Fraction, ...]) -> list[Fraction]:
    """P(k) for k = 0..L, if a token that the draft gave chance q is accepted with (1 + 3q) / 4."""
    reached, scores = Fraction(1), []
    for q in chances:
        accepted = (1 + 3 * q) / 4
        scores.append(reached * (1 - accepted))
        reached *= accepted
    return [*scores, reached]


def where_noise_is_sure(
    game: Game, situation: Situation, k: int, _count: int, chance: Chance
) -> Text:
    """One outcome for k = L, and one for the other k whose noise draws the likeliest token."""
    length = len(situation.record.tokens)
    drawn = [by_noise(game, situation, at, 1, chance)[0] for at in range(length + 1)]
    sure = [candidates(game, situation, at)[drawn[at]] for at in range(length)]
    return (drawn[k],) if k == length or sure[k] == max(sure) else ()


def where_noise_rejects(
    game: Game, situation: Situation, k: int, count: int, chance: Chance
) -> Text:
    """As planned for k = L; two outcomes shared by the other k whose uniform variate is high."""
    text, length = situation.state.text, len(situation.record.tokens)
    keys = [Key(len(text) - 1, len(text) + at, "accept") for at in range(length)]
    high = [at for at, key in enumerate(keys) if not chance.below(Fraction(1, 2), key)]
    if k < length:
        count = 2 // len(high) if k in high else 0
    return by_law(game, situation, k, count, chance)
