"""What must not decide what is served: each flaw shifts the law on a toy built to show it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.speculation.enumeration.chance import Renamed
from tests.speculation.enumeration.laws import autoregressive, emitted, emitted_by_batch
from tests.speculation.enumeration.ssd import Ssd, just_in_time, together
from tests.speculation.enumeration.ssd_flaws import (
    COIN,
    FLAWS,
    TWO,
    BestOfTwo,
    CutBeforeAOne,
    Rekeyed,
    ReusesTheTail,
    like,
    start_dropped,
)
from tests.speculation.enumeration.ssd_policies import shared, uniform
from tests.speculation.enumeration.toys import PROMPT


@pytest.mark.parametrize("flaw", FLAWS.values(), ids=FLAWS)
def test_every_flaw_changes_the_law_and_its_absence_does_not(flaw):
    expected = autoregressive(flaw.right.game.target, PROMPT, flaw.count)
    assert emitted(flaw.right.round, PROMPT, flaw.count) == expected
    assert emitted(flaw.wrong.round, PROMPT, flaw.count) != expected


def as_points_always(ssd: Ssd) -> Ssd:
    return replace(ssd, game=replace(ssd.game, q_arrives=lambda _state: False))


HARMLESS = {
    "the best of two, as point masses": as_points_always(like(TWO, BestOfTwo)),
    "a length chosen by content, as point masses": as_points_always(like(TWO, CutBeforeAOne)),
    "a dropped tail, as point masses": as_points_always(like(COIN, ReusesTheTail)),
    "start dropped under a fan-out blind to content": replace(
        like(COIN, Rekeyed, rename=start_dropped("draft")), fan_out=uniform(3)
    ),
    "start dropped where a redraft has the same tokens, as many as a hit": like(
        COIN, Rekeyed, rename=start_dropped("draft"), backup=just_in_time, optional_step=True
    ),
}


@pytest.mark.parametrize("ssd", HARMLESS.values(), ids=HARMLESS)
def test_harmless_changes_keep_the_law(ssd):
    assert emitted(ssd.round, PROMPT, 4) == autoregressive(ssd.game.target, PROMPT, 4)


def test_a_start_dropped_from_the_key_biases_rows_that_share_a_budget():
    ssd = replace(COIN, game=replace(COIN.game, k=2), optional_step=True)
    step, drop = together(ssd, shared(5), 4), start_dropped("draft")
    one = autoregressive(ssd.game.target, PROMPT, 3)
    independent = {(a, b): one[a] * one[b] for a in one for b in one}
    assert emitted_by_batch(step, (PROMPT, PROMPT), 3) == independent
    biased = emitted_by_batch(
        lambda rows, chance: step(rows, Renamed(chance, drop)), (PROMPT, PROMPT), 3
    )
    assert biased != independent
