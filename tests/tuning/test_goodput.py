"""The choice between rounds with and without the draft, and with branches, on a made-up clock."""

import random

import pytest

from ssd_jax.engine.planner import RoundPlan
from ssd_jax.engine.rounds.timer import TimedRound
from ssd_jax.tuning.goodput import INTERVAL, LOSS, TRIAL, GoodputPlanner

K = 4
PLANS = {"ar": RoundPlan(0), "sd": RoundPlan(K, branches=False), "ssd": RoundPlan(K)}


class Machine:
    """Rounds of an engine that a planner decides about.

    Args:
      plain, drafted: tokens per second of a round of one request, by the round's number.
      noise: most relative error of a round's time.

    Attributes:
      batches: slots that programs run without and with the draft; all rounds take as long.
    """

    def __init__(self, plain, drafted, *, noise=0.0, late=0):
        self.planner = GoodputPlanner([PLANS["sd"], PLANS["ar"]], timed=False)
        self._plain, self._drafted = plain, drafted
        self._draw, self._noise = random.Random(0), noise
        self._late, self._behind = late, 0  # rounds until the draft has caught up
        self.count = 0
        self.seconds = self.tokens = 0.0
        self.batches = [64, 64]

    def run(self, rounds, reach=1, rows=None):
        """Which rounds used the draft."""
        used, rows = [], rows or reach
        for _ in range(rounds):
            k = self.planner.plan(reach).k
            self._behind = self._late if not k else max(self._behind - 1, 0)
            drafts = bool(k) and not self._behind
            rate = (self._drafted if drafts else self._plain)(self.count)
            tokens = 3 if drafts else 1
            seconds = tokens / rate * (1 + self._noise * self._draw.uniform(-1, 1))
            facts = "sd" if k else "ar", rows, tokens * rows, reach, self.batches[bool(k)]
            self.planner.observe(TimedRound(K if drafts else 0, False, seconds, *facts))
            self.seconds, self.tokens = self.seconds + seconds, self.tokens + tokens
            self.count += 1
            used.append(drafts)
        return used


def always(rate):
    return lambda _round: rate


def test_it_begins_with_the_draft_and_tries_without_for_a_few_rounds():
    used = Machine(always(10.0), always(20.0)).run(INTERVAL + TRIAL + 50)
    assert used.index(False) == INTERVAL
    assert 1 <= used.count(False) <= TRIAL
    assert used[-50:] == [True] * 50


@pytest.mark.parametrize("slower", [5.0, 15.0, 19.0])
@pytest.mark.parametrize("late", [0, 20])
def test_trials_go_on_and_lose_a_bounded_share_of_the_time(slower, late):
    machine = Machine(always(slower), always(20.0), late=late)
    used = machine.run(10000)
    assert used[-2500:].count(False) >= 4
    lost = machine.seconds - machine.tokens / 20.0
    assert lost / machine.seconds < 1.2 * LOSS


@pytest.mark.parametrize("late", [0, 5])
def test_a_draft_that_slows_decoding_is_left_out(late):
    machine = Machine(always(20.0), always(10.0), late=late)
    used = machine.run(2 * INTERVAL)
    assert used[-20:] == [False] * 20
    used = machine.run(5000)
    assert TRIAL <= used.count(True) <= 20 * TRIAL  # it is tried again


def test_it_changes_with_the_text():
    machine = Machine(always(15.0), lambda n: 30.0 if n < 3000 or n > 12000 else 10.0)
    used = machine.run(20000)
    assert used[2500:3000].count(True) > 480
    assert used[10000:12000].count(True) < 50
    assert used[-1000:].count(True) > 950


def test_each_size_of_a_batch_has_its_own_choice():
    machine = Machine(always(15.0), always(30.0))
    machine.run(300, reach=1)
    machine._drafted = always(10.0)  # with many requests
    assert machine.run(300, reach=30)[-100:].count(True) <= TRIAL
    machine._drafted = always(30.0)
    assert machine.run(40, reach=1).count(True) >= 40 - TRIAL
    assert machine.run(40, reach=17).count(True) <= TRIAL  # the size of 30
    assert machine.run(40, reach=30, rows=1).count(True) <= TRIAL  # one request in a high slot


def test_rounds_of_one_size_compare_whatever_the_number_of_their_requests():
    """A plan is not slow because few requests were there while it was tried."""
    machine = Machine(always(10.0), always(12.0))
    machine.run(INTERVAL, reach=8, rows=8)
    machine.run(TRIAL, reach=8, rows=8)
    assert machine.run(20, reach=8, rows=1).count(True) == 20
    machine = Machine(always(12.0), always(10.0))
    machine.run(INTERVAL, reach=8, rows=8)
    machine.run(TRIAL, reach=8, rows=1)
    assert machine.run(20, reach=8, rows=8).count(True) == 0
    machine = Machine(always(12.0), always(10.0))
    assert machine.run(300, reach=8, rows=1)[100:].count(True) <= 2 * TRIAL


def test_once_smaller_programs_have_come_other_plans_are_tried_soon():
    """Whatever trials have lost before."""
    machine = Machine(always(1.0), always(11.0))
    machine.run(10 * INTERVAL)
    machine.batches[:] = 1, 1
    machine._plain = always(20.0)  # few requests: the draft does not pay
    used = machine.run(3 * INTERVAL)
    assert used[-INTERVAL // 2 :].count(True) == 0


def test_rounds_with_smaller_programs_are_not_averaged_with_those_before():
    machine = Machine(always(10.0), always(10.2))
    machine.run(10 * INTERVAL)
    machine.batches[:] = 1, 1
    machine._plain, machine._drafted = always(20.0), always(40.0)
    assert machine.run(3 * INTERVAL).count(False) <= 2 * TRIAL


def test_each_size_begins_with_the_plan_that_it_is_given():
    plans = [PLANS["ar"], PLANS["ssd"]]
    planner = GoodputPlanner(plans, timed=False, first=lambda size: int(size <= 2))
    assert [planner.plan(reach).mode for reach in (1, 2, 3, 9)] == ["ssd", "ssd", "ar", "ar"]


@pytest.mark.parametrize(("plain", "drafted"), [(10, 20), (20, 10), (10, 11), (11, 10)])
def test_its_goodput_is_near_that_of_the_better_way(plain, drafted):
    machine = Machine(always(plain), always(drafted), noise=0.1)
    machine.run(10000)
    assert machine.tokens / machine.seconds > 0.97 * max(plain, drafted)


@pytest.mark.parametrize("first", PLANS)
@pytest.mark.parametrize("fastest", PLANS)
def test_the_fastest_of_three_modes_is_found_whichever_it_begins_with(first, fastest):
    rates = dict.fromkeys(PLANS, 10.0) | {fastest: 14.0}
    order = sorted(PLANS, key=lambda mode: mode != first)
    planner = GoodputPlanner([PLANS[mode] for mode in order], timed=False)
    used = []
    for _ in range(4 * INTERVAL):
        mode = planner.plan(1).mode
        used.append(mode)
        proposed = 0 if mode == "ar" else K
        planner.observe(TimedRound(proposed, False, 1 / rates[mode], mode, 1, 1))
    assert used[0] == first
    assert used[-1] == fastest


def test_rounds_in_which_the_draft_catches_up_say_nothing_of_it():
    planner = GoodputPlanner([PLANS["sd"], PLANS["ar"]], timed=False)
    for _ in range(3 * INTERVAL):
        mode = planner.plan(1).mode
        planner.observe(TimedRound(0, False, 1.0 if mode == "ar" else 0.1, mode, 1, 1))
    assert planner.plan(1).mode == "sd"  # nothing to compare with
