"""Who makes room where the queue is full."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest

from ssd_jax.server.admission import Admission
from ssd_jax.server.errors import ApiError
from tests.server.http_calls import call, post, stream
from tests.waiting import eventually

PATH = "/v1/completions"


def body(priority, **more):
    return {"prompt": "hi", "max_tokens": 3, "priority": priority, **more}


async def letters(text, gate):
    """Letters, once the gate is open."""
    await gate.wait()
    for letter in text:
        yield letter


class Asking:
    """A request that is admitted, and in time gets two letters."""

    def __init__(self, admission, priority, texts=1):
        self.gate, self.got, self.error = asyncio.Event(), "", None
        self.task = asyncio.create_task(self._ask(admission, priority, texts))

    async def _ask(self, admission, priority, texts):
        try:
            with admission.admit(texts, priority=priority) as place:
                async for letter in place.guard(letters("ab", self.gate)):
                    self.got += letter
                    await asyncio.sleep(0)
        except ApiError as error:
            self.error = error


async def asked(admission, *priorities, texts=1):
    requests = []
    for priority in priorities:
        requests.append(Asking(admission, priority, texts))
        await asyncio.sleep(0)
    return requests


async def ended(*requests):
    for request in requests:
        request.gate.set()
    await asyncio.gather(*(request.task for request in requests))
    return [request.got for request in requests]


def test_a_full_queue_refuses_the_youngest_of_the_lowest_priority_in_place_of_a_higher_one():
    async def run():
        admission = Admission(slots=1, queue=3)
        old, first, second, high = await asked(admission, 5, 5, 5, 0)
        (new,) = await asked(admission, 3)
        await second.task
        assert (second.error.status, second.error.code) == (429, "queue_full")
        assert second.error.retry_after >= 1
        assert admission.texts == 4
        (same,) = await asked(admission, 5)
        assert same.error.status == 429
        assert await ended(old, first, high, new) == ["ab"] * 4
        assert admission.texts == 0

    asyncio.run(run())


def test_what_has_a_token_is_not_displaced():
    async def run():
        admission = Admission(slots=1, queue=0)
        (low,) = await asked(admission, 9)
        low.gate.set()
        while not low.got:
            await asyncio.sleep(0)
        (high,) = await asked(admission, 0)
        assert high.error.status == 429
        assert await ended(low) == ["ab"]

    asyncio.run(run())


def test_nobody_is_displaced_in_vain_and_no_more_than_are_needed():
    async def run():
        admission = Admission(slots=2, queue=2)
        low, *others = await asked(admission, 9, 7, 0, 0)
        (many,) = await asked(admission, 1, texts=3)
        assert many.error.status == 429
        (two,) = await asked(admission, 1, texts=1)
        await low.task
        assert low.error.status == 429
        assert await ended(*others, two) == ["ab"] * 4

    asyncio.run(run())


def test_a_request_that_is_displaced_before_it_is_decoded_is_never_decoded():
    async def run():
        admission = Admission(slots=1, queue=0)
        with admission.admit(1, priority=1) as low, admission.admit(1) as high:
            assert (low.displaced, high.displaced) == (True, False)
            gate = asyncio.Event()
            gate.set()
            with pytest.raises(ApiError, match="of a lower `priority` than 1"):
                await anext(low.guard(letters("a", gate)))
            assert admission.texts == 1
        assert admission.texts == 0

    asyncio.run(run())


@contextlib.contextmanager
def waiting(server, *bodies):
    """Requests that wait; gives the list of their responses."""
    answers = {}

    def ask(number, fields):
        if fields.get("stream"):
            answers[number] = stream(server.port, PATH, fields)
        else:
            answers[number] = call(server.port, "POST", PATH, fields)

    threads = []
    for number, fields in enumerate(bodies):
        threads.append(threading.Thread(target=ask, args=(number, fields)))
        threads[-1].start()
        eventually(lambda number=number: server.state.admission.texts == number + 1)
    try:
        yield answers
    finally:
        server.state.engine.held = False
        for thread in threads:
            thread.join()


def test_displaced_requests_get_429_or_an_event_and_the_others_their_texts(server, engine):
    engine.held = True
    asked_for = [body(0), body(0), body(0), body(0), body(7), body(7, stream=True)]
    with waiting(server, *asked_for) as answers:
        status, refused = post(server.port, PATH, body(7))
        assert (status, refused["error"]["code"]) == (429, "queue_full")
        high = [threading.Thread(target=post, args=(server.port, PATH, body(1))) for _ in range(2)]
        for thread in high:
            thread.start()
        eventually(lambda: {4, 5} <= answers.keys())
        assert server.state.admission.texts == 6
        engine.held = False
        for thread in high:
            thread.join()
    status, headers, refused = answers[4]
    assert (status, refused["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    assert answers[5][0]["error"]["code"] == "queue_full"
    assert [answers[number][0] for number in range(4)] == [200] * 4
