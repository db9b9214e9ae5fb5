"""Time-outs: when a request ends that takes too long, and what is left of it."""

import asyncio

import pytest

from ssd_jax.server.deadlines import before
from tests.server.http_calls import error_of, post, raw, request_text, stream
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}


class Source:
    """Gives a number every `seconds`, and remembers when it was closed."""

    def __init__(self, seconds):
        self.seconds, self.closed = seconds, None

    async def items(self):
        try:
            for number in range(10_000):
                await asyncio.sleep(self.seconds)
                yield number
        finally:
            self.closed = asyncio.get_running_loop().time()


def run(seconds, deadline, take):
    """Runs `take` on what comes before a deadline; returns the source, and how late it closed."""

    async def main():
        source, now = Source(seconds), asyncio.get_running_loop().time()
        with pytest.raises(TimeoutError):
            await take(before(now + deadline, source.items()))
        return source.closed - now - deadline

    return asyncio.run(main())


async def take_all(items):
    async for _ in items:
        pass


async def take_slowly(items):
    async for _ in items:
        await asyncio.sleep(3)


@pytest.mark.parametrize(
    ("seconds", "take"), [(60.0, take_all), (0.001, take_all), (0.001, take_slowly)]
)
def test_the_source_is_closed_at_the_deadline_whoever_waits(seconds, take):
    assert 0 <= run(seconds, 0.05, take) < 2


def test_what_ends_in_time_is_whole():
    async def main():
        async def three():
            for number in range(3):
                yield number

        loop = asyncio.get_running_loop()
        assert [item async for item in before(loop.time() + 60, three())] == [0, 1, 2]

    asyncio.run(main())


def test_a_source_is_closed_with_its_reader():
    async def main():
        source = Source(0.001)
        items = before(asyncio.get_running_loop().time() + 60, source.items())
        await anext(items)
        await items.aclose()
        assert source.closed is not None

    asyncio.run(main())


def test_a_request_that_takes_too_long_gets_504_and_frees_its_slots(server, engine):
    engine.held = True
    body = {**COMPLETION, "timeout": 0.05, "n": 2}
    status, error = error_of(server.port, "/v1/completions", body)
    assert (status, error["type"], error["code"]) == (504, "timeout_error", "timeout")
    assert "within 0.05 seconds, after 0 tokens" in error["message"]
    eventually(lambda: engine.running == server.state.admission.texts == 0)


def test_a_stream_that_takes_too_long_ends_with_an_error_event(server, engine):
    engine.held = True
    (event,) = stream(server.port, "/v1/completions", {**COMPLETION, "timeout": 0.05})
    assert event["error"]["code"] == "timeout"
    eventually(lambda: engine.running == 0)


def test_a_client_that_reads_nothing_keeps_no_slot_beyond_its_time():
    """Longer than what sockets and the server hold for it."""
    engine = ScriptedEngine()
    engine.most = 10**9
    with served(engine) as server:
        body = {"model": "m", "prompt": "hi", "timeout": 1, "max_tokens": 10**9, "stream": True}
        with raw(server.port, request_text(body)):
            eventually(lambda: engine.running == 1)
            eventually(lambda: engine.running == 0)


def test_the_servers_limit_holds_where_a_request_gives_none():
    engine = ScriptedEngine()
    engine.held = True
    with served(engine, request_timeout=1.5) as server:
        assert error_of(server.port, "/v1/completions", COMPLETION)[1]["code"] == "timeout"
        engine.held = False
        assert post(server.port, "/v1/completions", {**COMPLETION, "timeout": 1.4})[0] == 200
        status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "timeout": 2})
        assert (status, error["param"]) == (400, "timeout")
        assert "more than 1.5 seconds" in error["message"]


@pytest.mark.parametrize("timeout", [0, -1, 1e999])
def test_a_time_out_out_of_range_is_refused(server, timeout):
    body = {**COMPLETION, "timeout": timeout}
    assert error_of(server.port, "/v1/completions", body)[0] == 400


def test_a_priority_reaches_the_engine(server, engine):
    engine.asked.clear()
    post(server.port, "/v1/completions", {**COMPLETION, "priority": -3, "n": 2})
    post(server.port, "/v1/completions", COMPLETION)
    assert [request.priority for request in engine.asked] == [-3, -3, 0]
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "priority": "high"})
    assert (status, error["param"]) == (400, "priority")
