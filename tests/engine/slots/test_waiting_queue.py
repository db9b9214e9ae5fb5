"""The order in which requests enter slots: by priority, then by age, and none waits for ever."""

import threading
import types

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.engine.slots.waiting_queue import MOST_OVERTAKEN, WaitingQueue
from ssd_jax.errors import InputError
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import Clock, Letters
from tests.engine.letters import LONG, drain, make, spell
from tests.fakes.paged import CONTEXT, SIZE, Paged


def state(request_id, priority=0):
    request = types.SimpleNamespace(priority=priority)
    return types.SimpleNamespace(request_id=request_id, request=request, overtaken=0)


def order(queue):
    return [state.request_id for state in queue]


def asked(engine, priority=0, tokens=4):
    return engine.add(
        Request(
            prompt_ids=[65, 66, 67], params=SamplingParams(max_tokens=tokens), priority=priority
        )
    )


def test_a_lower_priority_comes_first_and_of_the_same_one_the_older():
    queue = WaitingQueue()
    for request_id, priority in enumerate([0, 5, -1, 0, 5, -1]):
        queue.add(state(request_id, priority))
    assert order(queue) == [2, 5, 0, 3, 1, 4]
    assert queue.first.request_id == 2
    assert len(queue) == 6


def test_what_is_not_there_can_be_removed():
    queue = WaitingQueue()
    queue.remove(state(0))
    assert queue.first is None
    assert not queue


def test_a_request_that_was_overtaken_often_enough_is_first():
    queue, patient = WaitingQueue(), state(0, priority=9)
    queue.add(patient)
    for request_id in range(1, 1000):
        queue.add(state(request_id, priority=-1))
        if queue.first is patient:
            break
        queue.enter(queue.first)
    assert request_id == MOST_OVERTAKEN + 1


def test_those_of_one_priority_overtake_nobody():
    queue = WaitingQueue()
    states = [state(request_id) for request_id in range(5)]
    for waiting in states:
        queue.add(waiting)
    while queue.first is not None:
        queue.enter(queue.first)
    assert [state.overtaken for state in states] == [0] * 5


def test_threads_may_add_while_others_enter():
    queue = WaitingQueue()

    def add(first):
        for request_id in range(first, 2000, 4):
            queue.add(state(request_id, request_id % 3))

    threads = [threading.Thread(target=add, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    entered = []
    while len(entered) < 2000:
        if (first := queue.first) is not None:
            queue.enter(first)
            entered.append(first.request_id)
    assert sorted(entered) == [*range(2000)]


def ends(engine):
    return [event.request_id for event in drain(engine) if event.output is not None]


def test_an_engine_decodes_by_priority():
    _, engine = make(spell(LONG), slots=1)
    low, middle, high = (asked(engine, priority) for priority in (1, 0, -1))
    assert ends(engine) == [high, middle, low]


def test_without_priorities_the_oldest_comes_first():
    _, engine = make(spell(LONG), slots=1)
    asked_for = [asked(engine) for _ in range(4)]
    assert ends(engine) == asked_for


def test_a_constant_stream_of_urgent_requests_starves_nobody():
    _, engine = make(spell(LONG), slots=1)
    patient, done = asked(engine, 9, tokens=1), False
    for _ in range(3 * MOST_OVERTAKEN):
        asked(engine, -1, tokens=1)
        done |= any(e.request_id == patient and e.output for e in engine.step())
        if done:
            break
    assert done


def test_the_last_in_rank_is_preempted_however_old_it_is():
    target = Paged(spell(LONG), slots=2, context=CONTEXT)
    stock = PageStock(slots=2, count=14, size=SIZE, beyond=1, context=CONTEXT, grows=True)
    engine = Engine(target, Letters, frozenset({1}), clock=Clock(), pages=stock)
    old, urgent = asked(engine, 1, tokens=40), asked(engine, 0, tokens=40)
    found = {e.request_id: e.output for e in drain(engine) if e.output is not None}
    assert found[urgent].metrics["preemptions"] == 0
    assert found[old].metrics["preemptions"] > 0
    assert found[old].text == found[urgent].text == LONG[:40]


@pytest.mark.parametrize("priority", [None, "high", 0.5])
def test_what_is_no_number_is_no_priority(priority):
    _, engine = make(spell(LONG))
    with pytest.raises(InputError, match=r"priority = .* is no integer"):
        asked(engine, priority)
