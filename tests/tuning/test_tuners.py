"""Choosing K and M while decoding."""

import numpy as np
import pytest

from ssd_jax.speculation.fan_out import UniformFanOut, VerificationStats
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan
from ssd_jax.tuning.throughput import Costs, Guess, miss_rate
from ssd_jax.tuning.tuners import FastestTuner, UpdatedGuess

COSTS = Costs(
    verify={0: 1.0, 2: 1.1, 8: 1.4},
    draft=0.1,
    backup=0.1,
    step={4: 0.1, 8: 0.15, 16: 0.3},
)


ACCEPTED = VerificationStats(8, 8, "miss", 2, 0)
REJECTED = VerificationStats(0, 8, "miss", 2, None)


def plans(tuner, rounds, verified=None, steps=dict):
    """What is chosen while every verification ends alike, after hits and after misses."""
    found = []
    for _ in range(rounds):
        found.append(tuner.plan(rows=1, steps=steps))
        if verified is not None:
            tuner.observe(verified)
            tuner.observe(verified._replace(after="hit"))
    return found


def ssd_tuner(**settings):
    defaults = {"ks": range(1, 9), "budgets": (4, 8, 16), "waits": (True,)}
    given = defaults | settings
    return FastestTuner(COSTS, UpdatedGuess(Guess()), fan_out=UniformFanOut(), **given)


def test_a_fixed_tuner_keeps_its_plan():
    assert (
        plans(FixedTuner(SpeculationPlan(k=3, budget=5)), 3, REJECTED)
        == [SpeculationPlan(k=3, budget=5)] * 3
    )


def test_k_follows_the_acceptance():
    low = plans(FastestTuner(COSTS, UpdatedGuess(Guess()), ks=range(1, 9)), 100, REJECTED)
    high = plans(FastestTuner(COSTS, UpdatedGuess(Guess()), ks=range(1, 9)), 100, ACCEPTED)
    assert low[-1].k < low[0].k < high[-1].k
    assert ssd_k(REJECTED) < ssd_k(ACCEPTED)


def ssd_k(verified):
    return plans(ssd_tuner(), 100, verified)[-1].k


def test_a_plan_holds_for_sixteen_rounds():
    found = plans(FastestTuner(COSTS, UpdatedGuess(Guess()), ks=range(1, 9)), 64, REJECTED)
    for begin in range(0, 64, 16):
        assert len(set(found[begin : begin + 16])) == 1
    assert len(set(found)) > 1


def test_branches_that_turn_out_slow_are_given_up():
    assert plans(ssd_tuner(ks=(3,)), 1)[0].budget == 16
    slow = plans(ssd_tuner(ks=(3,)), 40, steps=lambda: {16: 3.0})
    assert {plan.budget for plan in slow[16:]} == {4}  # scaled alike, the fewest cost least


def test_a_time_is_forgotten_once_no_round_had_those_branches_for_long():
    """Else what was slow once, while the machine was busy, would never be tried again."""
    steps = {16: 3.0, 8: 0.15, 4: 0.1}
    found = [plan.budget for plan in plans(ssd_tuner(ks=(3,)), 200, steps=lambda: steps)]
    assert found[0] == 16
    again = found.index(16, 16)
    left = max(place for place in range(again) if found[place] == 16)
    assert 64 < again - left <= 64 + 16
    assert found[again + 16] != 16


def test_times_of_branches_that_were_never_planned_are_not_taken():
    (plan,) = plans(ssd_tuner(ks=(3,)), 1, steps=lambda: {16: 3.0, 8: 3.0, 4: 0.1})
    assert plan.budget == 16


def test_only_what_is_prepared_is_chosen():
    found = plans(ssd_tuner(ks=(3,), budgets=(8,)), 40, REJECTED)
    assert set(found) == {SpeculationPlan(k=3, budget=8)}


def test_a_guess_is_outweighed_by_what_is_observed():
    seen = UpdatedGuess(Guess(acceptance=0.8, single_miss=0.5))
    assert seen.rates(2, "hit") == pytest.approx([0.8, 0.8])
    assert seen.single_miss == 0.5
    assert seen.guess == Guess(acceptance=0.8, single_miss=0.5)
    for _ in range(8):
        seen.observe(VerificationStats(1, 2, "hit", 1, None))
    # 8 of 16 tokens, and a guess worth 8 of them; 8 single branches that missed.
    assert seen.guess.judged == 16
    assert seen.guess.acceptance == pytest.approx((8 + 8 * 0.8) / (16 + 8))
    assert seen.single_miss == pytest.approx((8 + 8 * 0.5) / (8 + 8))
    assert seen.rates(2, "hit")[1] < 0.5 < seen.rates(2, "hit")[0]


def test_a_text_counts_for_its_length_beside_those_of_earlier_starts():
    """Else the acceptance of the last text would choose the mode of the next."""
    guess = Guess(acceptance=0.8, single_miss=0.2, judged=300)
    for _ in range(2):
        seen = UpdatedGuess(guess)
        for _ in range(50):
            seen.observe(VerificationStats(1, 2, "hit", 1, None))
        guess = seen.guess
    assert guess.judged == 500
    assert guess.acceptance == pytest.approx((300 * 0.8 + 100) / 500)
    # Single branches that missed 50 times of 58, and then once more.
    first = 0.75 * 0.2 + 0.25 * (50 + 8 * 0.2) / 58
    assert guess.single_miss == pytest.approx(0.8 * first + 0.2 * (50 + 8 * first) / 58)


def test_old_observations_fade():
    seen = UpdatedGuess(Guess(acceptance=0.9, judged=10**6))
    for _ in range(1024):
        seen.observe(VerificationStats(1, 2, "hit", 1, 0))
    assert seen.guess.acceptance == pytest.approx((0.9 + 0.5) / 2)
    assert seen.guess.judged == 10**6 + 2048


def test_a_rate_of_one_stays_a_probability():
    seen = UpdatedGuess(Guess(single_miss=1.0))
    for _ in range(50):
        seen.observe(VerificationStats(0, 0, "miss", 16, None))
    assert seen.guess.single_miss == 1.0
    assert seen.guess.judged == 0
    assert seen.guess.acceptance == pytest.approx(0.8)


def test_look_ups_without_branches_say_nothing_of_misses():
    seen = UpdatedGuess(Guess())
    for _ in range(20):
        seen.observe(VerificationStats(1, 2, "miss", 0, None))
    assert seen.single_miss == 0.5


@pytest.mark.parametrize("r", [0.4, 1.0, 2.0])
def test_the_next_start_expects_the_misses_that_this_one_had(r):
    """A c that was observed beside one r means nothing beside another."""
    rng, seen = np.random.default_rng(0), UpdatedGuess(Guess())
    for _ in range(2000):
        prepared, passed = int(rng.integers(1, 9)), rng.random()
        ranks = (rank for rank in range(prepared) if passed > 0.5 * (rank + 1) ** -r)
        seen.observe(VerificationStats(3, 4, "hit", prepared, next(ranks, None)))
    for known in (seen, seen.guess, UpdatedGuess(seen.guess)):
        for count in (1, 2, 4, 8):
            assert miss_rate(count, known) == pytest.approx(0.5 * count**-r, abs=0.04), count


def test_a_round_is_expected_to_take_what_its_plan_costs():
    sd = FastestTuner(COSTS, UpdatedGuess(Guess()), ks=(2,))
    assert sd.seconds(2, missed=True) == pytest.approx(1.1 + 2 * 0.1)
    assert sd.seconds(0, missed=True) is None
    ssd = ssd_tuner(ks=(2,), budgets=(16,))
    ssd.plan(rows=1, steps=dict)
    assert ssd.seconds(2, missed=False) == pytest.approx(1.1)
    assert ssd.seconds(2, missed=True) == pytest.approx(1.1 + 2 * 0.1)
