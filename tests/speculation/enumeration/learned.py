"""The engine's own policies that learn, in the enumeration: they are pure host code."""

from __future__ import annotations

import functools
from collections.abc import Callable
from fractions import Fraction

from ssd_jax.sampling.confidence import EDGES
from ssd_jax.speculation.fan_out import After, FanOut, VerificationStats
from tests.speculation.enumeration.ssd import HIT, Counts, Judged, Situation
from tests.speculation.enumeration.ssd import FanOut as Reference

_EDGES = tuple(map(Fraction, EDGES))  # compared with fractions, which floats are slow to be


def played(make: Callable[[], FanOut], budget: int) -> Reference:
    """A policy that has observed the verifications of its sequence; each run makes a new one."""

    @functools.cache
    def taught(learned: tuple[Judged, ...]) -> FanOut:
        policy = make()
        for judged in learned:
            policy.observe(_verified(judged))
        return policy

    def counts(situation: Situation) -> Counts:
        after = _after(situation.served.source == HIT)
        length = len(situation.record.tokens)
        confidence = _confidence(situation.chances)
        return taught(situation.state.learned).counts(length, budget, after, confidence)

    return counts


def _verified(judged: Judged) -> VerificationStats:
    accepted, length, hit, prepared, rank, chances = judged
    return VerificationStats(accepted, length, _after(hit), prepared, rank, _confidence(chances))


@functools.cache
def _confidence(chances: tuple[Fraction, ...]) -> tuple[int, ...]:
    """Classes of the draft's probabilities of the proposed tokens."""
    return tuple(sum(chance >= edge for edge in _EDGES) for chance in chances)


def _after(hit: bool) -> After:
    return "hit" if hit else "miss"
