"""Fan-outs that learn from the rounds of their own sequence leave its law alone."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from fractions import Fraction

import pytest

from ssd_jax.speculation.fan_out import ConfidenceFanOut, MeasuredFanOut
from tests.selection import cases
from tests.speculation.enumeration import toys
from tests.speculation.enumeration.laws import autoregressive, emitted
from tests.speculation.enumeration.learned import played
from tests.speculation.enumeration.rounds import Game, State, block, coupled, ratio
from tests.speculation.enumeration.ssd import (
    HIT,
    MISS,
    Counts,
    Situation,
    Ssd,
    by_law,
    by_noise,
    just_in_time,
    nothing,
    saguaro,
)
from tests.speculation.enumeration.toys import PROMPT

GAME = Game(target=toys.TARGET3, draft=toys.DENSE3, k=2)
# Guesses worth little, so that a round or two change what is prepared.
LEARNED = {
    "measured": lambda: MeasuredFanOut(acceptance=0.5, weight=0.5),
    "confidence": lambda: ConfidenceFanOut(acceptance=0.5, weight=0.5),
}
EVERY_POLICY = pytest.mark.parametrize("make", LEARNED.values(), ids=LEARNED)


class Watched:
    """A fan-out, and whether it ever gave other counts than before it learned anything."""

    def __init__(self, make):
        self._counts, self.learned = played(make, 3), False

    def __call__(self, situation: Situation) -> Counts:
        counts = self._counts(situation)
        untaught = situation._replace(state=situation.state._replace(learned=()))
        self.learned |= counts != self._counts(untaught)
        return counts


@EVERY_POLICY
@pytest.mark.parametrize("verify", [ratio, block, coupled])
@pytest.mark.parametrize("rank", cases([by_law, by_noise], by_noise))
@pytest.mark.parametrize("backup", cases([nothing, just_in_time], just_in_time))
def test_a_policy_that_learns_from_its_own_sequence_keeps_the_law(make, verify, rank, backup):
    fan_out, rounds = Watched(make), defaultdict(Fraction)

    def watch(row: State, mass: Fraction) -> None:
        rounds[row.cache[0]] += mass

    ssd = Ssd(
        game=replace(GAME, verify=verify), fan_out=fan_out, rank=rank, backup=backup, learns=True
    )
    count = 4 if verify is not coupled else 3  # where few runs go on after a miss
    assert emitted(ssd.round, PROMPT, count, watch) == autoregressive(GAME.target, PROMPT, count)
    assert rounds[HIT] > 0
    assert rounds[MISS] > 0 or verify is coupled
    assert fan_out.learned


@pytest.mark.parametrize("policy", cases(LEARNED, "measured"))
@pytest.mark.parametrize("c", [Fraction(1, 2), Fraction(0)], ids=["C=.5", "C=0"])
def test_a_policy_that_learns_keeps_the_law_with_saguaro_sampling(policy, c):
    game = replace(GAME, proposal=saguaro(c, (1, 1)))
    ssd = Ssd(game=game, fan_out=played(LEARNED[policy], 3), rank=by_noise, learns=True)
    assert emitted(ssd.round, PROMPT, 4) == autoregressive(GAME.target, PROMPT, 4)
