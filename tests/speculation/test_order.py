"""Whether the draft or the target is told first, by the time that the draft has left."""

import pytest

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.speculation.order import Order
from tests.engine.test_engine import drain, outputs, request
from tests.speculation.test_tuned_rounds import LONG, spell
from tests.speculation.watched import ssd

MS = 1e-3


def after(order, *spare):
    """The order after rounds in which the draft had so many milliseconds left."""
    for each in spare:
        order.ended(each * MS)
    return order.first


def asking(delay):
    order = Order(first=True, changes=True)
    order.delayed(delay * MS)
    return order


def test_a_draft_that_is_idle_for_longer_than_a_dispatch_is_asked_behind_it():
    assert after(asking(1), *[1.5] * 7)
    assert not after(asking(1), *[1.5] * 8)
    assert after(asking(2), *[1.5] * 20)
    assert after(
        Order(first=True, changes=True), *[1.5] * 20
    )  # who knows how long a dispatch takes


def test_one_round_without_time_to_spare_is_enough_to_ask_first():
    order = asking(1)
    assert after(order, *[1.5] * 7, 0.1, *[1.5] * 7)
    assert not after(order, 1.5)
    assert not after(order, *[0.5] * 20)
    assert after(order, 0.1)
    assert after(order, *[1.5] * 7)
    assert not after(order, 1.5)


@pytest.mark.parametrize("first", [False, True])
def test_an_order_that_does_not_change_stays(first):
    order = Order(first=first)
    order.delayed(MS)
    assert after(order, *[0] * 20, *[5] * 20) == first


def told(order, *rounds):
    """The order after rounds of a second: when each forward ended, of two that were asked for."""
    for number, ends in enumerate(rounds):
        order.asked(number, 2)
        order.worked([Busy("prefill", number, number + 0.99)])
        order.worked([Busy("grow", number, number + end) for end in ends])
        order.asked(number + 1, 2)
        order.outcome(number + 0.9)
        order._asked.clear()
    return order.first


def test_time_to_spare_is_from_the_last_forward_to_the_outcome():
    assert not told(asking(300), *[(0.1, 0.5)] * 8)
    assert told(asking(300), *[(0.1, 0.7)] * 20)


def test_a_draft_that_has_not_done_all_forwards_has_none_to_spare():
    assert told(asking(300), *[(0.1,)] * 20)
    assert told(asking(300), *[(0.1, 0.95)] * 20)


def test_forwards_of_the_next_branches_do_not_count():
    order = asking(300)
    for number in range(20):
        order.worked([Busy("grow", number, number + 0.1)])
        order.asked(number, 1)
        order.worked([Busy("grow", number + 0.01, number + 0.5)])
        order.outcome(number - 0.05)
    assert not order.first


@pytest.mark.parametrize(("seconds", "changes"), [(0.5, True), (1000.0, False)])
def test_the_controller_changes_the_order_when_the_draft_has_time(seconds, changes):
    """By a clock that goes on by a second with each look."""
    now, calls, asked = 100.0, [], []

    class Noted(Order):
        def asked(self, at, forwards):
            asked.append((at, forwards))
            super().asked(at, forwards)

    def clock():
        nonlocal now
        now += 1.0
        return now

    def activity():
        spans = [Busy("grow", at, at + seconds) for at, forwards in asked for _ in range(forwards)]
        asked.clear()
        return Activity(tuple(spans))

    order = Noted(first=True, changes=True)
    parts = ssd(spell(LONG), remote=True, order=order, activity=activity, clock=clock)
    forward, speculate = parts.target.forward, parts.controller.speculate
    parts.target.forward = lambda *to: (calls.append("f"), forward(*to))[1]
    parts.controller.speculate = lambda: (calls.append("s"), speculate())[1]
    parts.engine.add(request(max_tokens=40))
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG[:40]
    said = "".join(calls)
    assert said.startswith("ssfsfsf")
    assert ("ff" in said) == changes
