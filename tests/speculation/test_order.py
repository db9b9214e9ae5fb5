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


@pytest.mark.parametrize(("spare", "changes"), [(5.0, True), (0.5, False)])
def test_the_controller_changes_the_order_when_the_draft_has_time(spare, changes):
    """By a clock on which a dispatch takes a second."""
    parts, now, order = ssd(spell(LONG), remote=True), 100.0, []

    def clock():
        nonlocal now
        now += 1.0
        return now

    forward, speculate, propose = (
        parts.target.forward, parts.controller.speculate, parts.controller.propose,
    )  # fmt: skip

    def proposes(batch):
        nonlocal ended
        ended = now + 1.0 - spare  # which is before the next look at the clock
        return propose(batch)

    ended = 0.0
    parts.controller._clock = clock
    parts.controller._order = Order(first=True, changes=True)
    parts.controller._activity = lambda: Activity((Busy("grow", ended - 1.0, ended),))
    parts.controller.propose = proposes
    parts.target.forward = lambda *to: (order.append("f"), forward(*to))[1]
    parts.controller.speculate = lambda: (order.append("s"), speculate())[1]
    parts.engine.add(request(max_tokens=40))
    (output,) = outputs(drain(parts.engine)).values()
    assert output.text == LONG[:40]
    said = "".join(order)
    assert said.startswith("ssfsfsf")
    assert ("ffs" in said) == changes
