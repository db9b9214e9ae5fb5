"""An `LLM` that several threads call, on scripted roles: one batch, and nobody is left behind."""

import asyncio
import functools
import gc
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.round_thread import TaskCaller
from ssd_jax.errors import DeviceError, InputError, SsdError
from ssd_jax.llm import llm as llm_module
from ssd_jax.llm.llm import LLM
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.testing.fakes import FakeTarget, Letters
from tests.engine.letters import LONG, request, spell
from tests.fakes.instrument import instrument

PATIENCE = 120  # seconds; only a failing test waits so long


@pytest.fixture
def shared(tiny_checkpoint):
    """An LLM that was not loaded, with scripted engines of K = 2 and 3: every round takes a while,
    and calls the `fault` of its target."""
    settings = {"mode": "sd", "draft": "ngram", "k": "2", "compile_cache": "off"}
    llm = LLM(str(tiny_checkpoint), load=False, ks=[3], **settings)
    for k in (2, 3):
        target = FakeTarget(spell(LONG), slots=4)
        target.fault = lambda: None
        instrument(
            target, delay={"forward": 2e-3}, fail={"forward": lambda *_, to=target: to.fault()}
        )
        llm._engines[k] = Engine(target, Letters, frozenset({1}))
        llm._engines[k].target = target
    return llm


def text(llm, size=40, k=2):
    (output,) = [e.output for e in llm.run([request(max_tokens=size)], "sd", k) if e.output]
    return output.text


def test_no_round_follows_once_a_process_ends(shared):
    stream = shared.run([request(max_tokens=60)])
    next(stream)
    thread = shared._rounds._thread
    shared._rounds.freeze()
    assert not thread.is_alive()
    with pytest.raises(SsdError, match="this model is closed"):
        shared._rounds.check()


@pytest.mark.parametrize(
    ("interval", "wakes"), [(0, [0, 1, 2, 3, 4]), (1000, [0, 3, 4])], ids=["at once", "together"]
)
def test_an_event_loop_wakes_for_the_first_event_and_the_last_and_between_them_by_its_interval(
    interval, wakes
):
    async def run():
        caller, put, woken = TaskCaller(None, interval), [], []
        caller._loop = SimpleNamespace(
            call_soon_threadsafe=lambda wake: (woken.append(len(put)), wake())
        )
        for event in (*events, SsdError("an error never waits")):
            caller.put(event)
            put.append(event)
        assert [await caller.next() for _ in events] == events
        with pytest.raises(SsdError, match="never waits"):
            await caller.next()
        return woken

    ended = SimpleNamespace(finish_reason="length")
    events = [SimpleNamespace(request_id=0, output=output) for output in (None, None, None, ended)]
    assert asyncio.run(run()) == wakes


@pytest.mark.parametrize("interval", [0, 0.01])
def test_an_event_loop_gets_all_events_in_their_order(shared, interval):
    async def run():
        requests = [request(max_tokens=60), request(max_tokens=40, index=1)]
        return [event async for event in shared.run_async(requests, "sd", interval=interval)]

    events = asyncio.run(run())
    for index in range(2):
        seen = [event for event in events if event.prompt_index == index]
        times = [event.time for event in seen]
        assert times == sorted(times)
        assert times[-1] - times[0] > 0.01  # when they were made, not when they were taken
        assert [t for event in seen for t in event.token_ids] == seen[-1].output.token_ids
        assert [event.output is None for event in seen] == [True] * (len(seen) - 1) + [False]


def together(*calls):
    """Results of calls in threads of their own, this one not among them."""
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE) for future in [pool.submit(call) for call in calls]]


def idle(llm):
    """Whether soon nothing is left of any request."""
    rounds, engines, end = llm._rounds, llm._engines.values(), time.monotonic() + PATIENCE
    while time.monotonic() < end:
        busy = any(engine._running or engine._seats.waiting for engine in engines)
        if not busy and not rounds._callers:
            return True
        time.sleep(1e-3)
    return False


def wait_for(engine, count):
    """Waits until an engine has so many requests."""
    end = time.monotonic() + PATIENCE
    while len(engine._running) + len(engine._seats.waiting) < count and time.monotonic() < end:
        time.sleep(1e-3)


def test_requests_of_several_threads_are_one_batch(shared):
    sizes, engine = [5 + 3 * n for n in range(12)], shared._engines[2]
    have_come = []

    def wait():
        if not have_come:
            have_come.append(wait_for(engine, len(sizes)))

    engine.target.fault = wait
    found = together(*[functools.partial(text, shared, size) for size in sizes])
    assert found == [LONG[:size] for size in sizes]
    rounds = engine.target.calls.count("forward")
    assert rounds < 0.6 * sum(sizes)  # of 4 slots
    assert idle(shared)


def test_engines_take_turns(shared):
    calls = [functools.partial(text, shared, 40, k) for k in (2, 3) * 3]
    assert together(*calls) == [LONG[:40]] * 6
    assert idle(shared)


def test_a_stream_that_nobody_reads_goes_on_and_keeps_its_events(shared):
    stream = shared.run([request(max_tokens=9)])
    first = next(stream)
    assert idle(shared)
    before = shared._engines[2].target.calls.count("forward")
    rest = list(stream)
    assert first.text + "".join(event.text for event in rest) == LONG[:9]
    assert shared._engines[2].target.calls.count("forward") == before


def test_a_stopped_request_ends_with_what_it_has(shared):
    target, stopped = shared._engines[2].target, threading.Event()
    target.fault = lambda: target.calls.count("forward") > 5 and stopped.wait(PATIENCE)
    with shared.started([request(max_tokens=60)]) as caller:
        events = [caller.next(), caller.poll(PATIENCE)]
        shared.stop(caller)
        stopped.set()
        while caller.open:
            events.append(caller.next())
    output = events[-1].output
    assert output.finish_reason == "cancelled"
    assert 0 < len(output.text) < len(LONG)
    assert "".join(event.text for event in events) == output.text
    assert idle(shared)


def test_a_look_for_an_event_does_not_wait_for_one(shared):
    target, going, over = shared._engines[2].target, threading.Event(), threading.Event()

    def hang():
        going.set()
        over.wait(PATIENCE)

    target.fault = hang
    with shared.started([request(max_tokens=3)]) as caller:
        assert going.wait(PATIENCE)
        events = [*iter(lambda: caller.poll(0.01), None)]
        assert caller.poll(0.01) is None
        over.set()
        while caller.open:
            events.append(caller.next())
    assert events[-1].output.text == LONG[:3]


def test_requests_before_one_that_is_refused_are_taken_back(shared):
    with pytest.raises(InputError, match="the prompt is empty"):
        list(shared.run([request(), request(), request(prompt=[])]))
    assert idle(shared)


def test_requests_before_an_interrupt_are_taken_back(shared, monkeypatch):
    engine = shared._engines[2]
    adds = engine.add

    def add(asked):
        signal.raise_signal(signal.SIGINT)
        return adds(asked)

    monkeypatch.setattr(engine, "add", add)
    with pytest.raises(KeyboardInterrupt):
        list(shared.run([request(), request()]))
    assert idle(shared)


@pytest.mark.parametrize("read", [0, 1, 3])
def test_a_stream_that_is_dropped_leaves_nothing_behind(shared, read):
    stream = shared.run([request(), request()])
    for _ in range(read):
        next(stream)
    del stream
    gc.collect()
    assert idle(shared)


def test_a_stream_that_goes_with_garbage_amid_a_round_is_cancelled_after_it(shared):
    class Cycle:
        pass

    target = shared._engines[2].target
    completed = Cycle()
    completed.self, completed.stream = completed, shared.run([request()])
    next(completed.stream)
    del completed
    collected = []
    target.fault = lambda: collected or collected.append(gc.collect())
    assert text(shared) == LONG[:40]
    assert idle(shared)


def test_a_wait_for_a_round_can_be_interrupted(shared):
    """At once: the round goes on."""
    target, going, over = shared._engines[2].target, threading.Event(), threading.Event()

    def hang():
        going.set()
        over.wait(PATIENCE)

    target.fault = hang
    with ThreadPoolExecutor(2) as pool:
        other = pool.submit(text, shared)
        going.wait(PATIENCE)
        main = threading.main_thread().ident

        def shoot():
            wait_for(shared._engines[2], 2)
            time.sleep(0.05)
            signal.pthread_kill(main, signal.SIGINT)

        pool.submit(shoot)
        with pytest.raises(KeyboardInterrupt):
            text(shared)
        assert not over.is_set()
        assert not other.done()
        over.set()
        assert other.result(PATIENCE) == LONG[:40]
    assert idle(shared)


def test_an_error_of_a_round_leaves_all_but_the_oldest_request_alone(shared):
    target, left = shared._engines[2].target, [3]

    def fail():
        left[0] -= 1
        if not left[0]:
            raise RuntimeError("out of order")

    target.fault = fail
    with ThreadPoolExecutor(4) as pool:
        calls = [pool.submit(text, shared) for _ in range(4)]
        errors = [call.exception(PATIENCE) for call in calls]
    assert [str(error) for error in errors if error] == ["out of order"]
    assert idle(shared)


def test_a_device_that_fails_is_an_error_for_all_who_wait_and_all_who_come(shared):
    engine, left = shared._engines[2], [9]
    target = engine.target

    def fail():
        wait_for(engine, 6)
        left[0] -= 1
        if not left[0]:
            raise DeviceError("out of memory")

    target.fault = fail
    streams = [shared.run([request(max_tokens=40)]) for _ in range(6)]

    def read(stream):
        found = []
        with pytest.raises(DeviceError, match="out of memory; open the model again"):
            found.extend(stream)
        return found[-1].output

    found = together(*[functools.partial(read, stream) for stream in streams])
    for output in found:
        assert output.finish_reason == "error"
        assert LONG.startswith(output.text)
    assert max(len(output.text) for output in found) > 3
    with pytest.raises(DeviceError, match="open the model again"):
        text(shared)
    assert idle(shared)
    assert text(shared, k=3) == LONG[:40]  # an engine of its own


def test_an_event_loop_is_told_of_a_device_that_fails(shared):
    def fail():
        raise DeviceError("out of memory")

    shared._engines[2].target.fault = fail
    with pytest.raises(DeviceError, match="out of memory; open the model again"):
        asyncio.run(shared.generate_async("ab"))


def test_outputs_are_in_the_order_of_the_prompts_whichever_ends_first(shared):
    asked = ["ab", "cd"], [SamplingParams(max_tokens=size) for size in (9, 3)]
    for found in (shared.generate(*asked), asyncio.run(shared.generate_async(*asked))):
        assert [len(output.token_ids) for output in found] == [9, 3]


def test_callers_that_wait_when_the_model_is_closed_get_an_error(shared):
    target, going = shared._engines[2].target, threading.Event()

    def wait():
        going.set()
        end = time.monotonic() + PATIENCE
        while not shared._rounds._closed and time.monotonic() < end:
            time.sleep(1e-3)

    target.fault = wait
    with ThreadPoolExecutor(5) as pool:
        waiting = [pool.submit(text, shared) for _ in range(5)]
        going.wait(PATIENCE)
        shared.close()
        errors = [future.exception(PATIENCE) for future in waiting]
    closed = [error for error in errors if error is not None]
    assert closed
    assert all(isinstance(error, SsdError) for error in closed)
    assert all("closed" in str(error) for error in closed)  # also of those that came too late
    assert any("was closed" in str(error) for error in closed)
    assert idle(shared)


def test_a_stream_whose_events_another_took_raises_an_error_that_says_so(shared, monkeypatch):
    engine = shared._engines[2]

    def take_all():
        while engine.has_work:
            Engine.step(engine)
        return []

    monkeypatch.setattr(engine, "step", take_all)
    with pytest.raises(SsdError, match="was run by another"):
        list(shared.run([request()]))


def loads_of(monkeypatch):
    """Threads that have loaded a model, in place of its weights."""
    loads = []

    def load(*_args, **_kwargs):
        loads.append(threading.current_thread())
        time.sleep(0.05)
        return SimpleNamespace(fallbacks=SimpleNamespace(lines=()), close=lambda: None)

    monkeypatch.setattr(llm_module, "load", load)
    return loads


def test_a_model_is_loaded_once_whoever_needs_it_or_asks_for_it(tiny_checkpoint, monkeypatch):
    loads = loads_of(monkeypatch)
    llm = LLM(str(tiny_checkpoint), load=False, compile_cache="off")
    found = together(*[lambda: llm.loaded] * 4)
    llm.load()
    assert len(loads) == 1
    assert len({id(one) for one in [*found, llm.loaded]}) == 1


def test_a_model_whose_costs_were_not_measured_is_loaded_again(tiny_checkpoint, monkeypatch):
    def stop(_event):
        raise KeyboardInterrupt

    loads = loads_of(monkeypatch)
    settings = {"mode": "auto", "draft": "ngram", "compile_cache": "off"}
    llm = LLM(str(tiny_checkpoint), load=False, **settings)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            llm.load(status=stop)
    assert len(loads) == 2
