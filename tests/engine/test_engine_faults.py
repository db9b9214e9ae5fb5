"""Errors at every place of a step: nothing is taken twice, lost, or waited for."""

import itertools

import pytest

from ssd_jax.engine.engine import Engine
from ssd_jax.errors import DeviceError
from ssd_jax.testing.fakes import Clock, Letters
from tests.engine.letters import EOS, LONG, drain, outputs, request, spell
from tests.fakes.instrument import At, instrument
from tests.fakes.repeatable import RepeatableDrafter, RepeatableTarget

ASKED = [request([65] * size, max_tokens=tokens) for size, tokens in ((3, 5), (9, 9), (2, 4))]


ERROR = RuntimeError("out of order")


def made(who, call, at, fault, *, after=False, drafts=True, asks_first=False, decoder=Letters):
    """An engine with a fault in one of its roles."""
    wrong = lambda position: position % 4 == 0  # noqa: E731
    target, drafter = RepeatableTarget(spell(LONG)), RepeatableDrafter(spell(LONG), wrong=wrong)
    drafter.asks_first = asks_first
    fault = At(at, fault)
    if at:
        role = target if who == "target" else drafter
        instrument(role, fail={call: fault}, after=after)
    drafter = drafter if drafts else None
    engine = Engine(target, decoder, frozenset({EOS}), drafter=drafter, clock=Clock())
    return engine, fault


def run(engine, asked=ASKED):
    """All events by request, and how often a step raised."""
    ids, events, raised = [engine.add(request) for request in asked], [], 0
    for _ in range(300):
        if not engine.has_work:
            break
        try:
            events += engine.step()
        except RuntimeError:
            raised += 1
    assert not engine.has_work
    return [[e for e in events if e.request_id == number] for number in ids], raised


def assert_whole(events, text):
    """Each event came once, and the last one has them all."""
    assert [event.output is not None for event in events] == [False] * (len(events) - 1) + [True]
    output = events[-1].output
    assert "".join(event.text for event in events) == output.text == text
    assert [token for event in events for token in event.token_ids] == output.token_ids


CALLS = [
    *itertools.product(["target"], ["prefill", "prefill_last", "forward", "accept", "read"]),
    *itertools.product(["drafter"], ["prefill", "gather", "propose", "speculate", "proposal"]),
]


OPENS = [("target", "open"), ("drafter", "open")]


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("who", "call", "drafts", "asks_first"),
    [
        (*method, *drafter)
        for method in CALLS
        for drafter in [(False, False), (True, False), (True, True)]
        if drafter[0] or method[0] == "target"
    ],
)
def test_after_an_error_no_token_comes_twice_and_none_is_lost(who, call, after, drafts, asks_first):
    for at in itertools.count(1):
        settings = {"after": after, "drafts": drafts, "asks_first": asks_first}
        engine, planted = made(who, call, at, ERROR, **settings)
        found, raised = run(engine)
        for events, asked in zip(found, ASKED, strict=True):
            assert_whole(events, LONG[: asked.params.max_tokens])
        assert raised == planted.happened
        if not planted.happened:
            assert at > 2
            return


@pytest.mark.parametrize("who", ["target", "drafter"])
def test_a_request_that_cannot_be_opened_ends_alone(who):
    engine, _ = made(who, "open", 2, ERROR)
    (first, second, third), raised = run(engine)
    assert raised == 0
    assert_whole(first, LONG[:5])
    assert_whole(second, "")
    assert second[-1].output.finish_reason == "error"
    assert_whole(third, LONG[:4])


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("who", "call"), [*CALLS, *OPENS])
def test_a_device_that_fails_ends_all_requests_with_what_they_have(who, call, after):
    for at in itertools.count(1):
        engine, planted = made(
            who, call, at, DeviceError("RESOURCE_EXHAUSTED: out of memory"), after=after
        )
        found, raised = run(engine)
        assert raised == 0
        if not planted.happened:
            return
        for events, asked in zip(found, ASKED, strict=True):
            output = events[-1].output
            assert_whole(events, LONG[: len(output.text)])
            assert (output.finish_reason == "error") == (len(output.text) < asked.params.max_tokens)
        with pytest.raises(DeviceError, match=r"RESOURCE_EXHAUSTED.*open the model again"):
            engine.step()
        with pytest.raises(DeviceError, match="open the model again"):
            engine.add(ASKED[0])


class Fussy(Letters):
    """A decoder that knows no 'k', the 9th letter, nor anything after it."""

    broken = False

    def push(self, ids):
        self.broken |= ord("k") in ids
        if self.broken:
            raise ValueError("no such token")
        return super().push(ids)

    def flush(self):
        return self.push(()) if self.broken else ""


def test_an_error_of_one_text_ends_that_request_alone(caplog):
    decoders = iter([Letters, Fussy, Letters])
    engine, _ = made(
        "target", "none", 0, ERROR, decoder=lambda after, **how: next(decoders)(after, **how)
    )
    found, raised = run(engine, [request(max_tokens=20) for _ in range(3)])
    assert raised == 0
    for place in (0, 2):
        assert_whole(found[place], LONG[:20])
    output = found[1][-1].output
    assert (output.text, output.finish_reason) == ("the quic", "error")
    assert "no such token" in caplog.text


def test_a_stop_string_cannot_end_a_request_twice():
    """Its stop is found in what was committed before it was cancelled."""
    engine, _ = made("drafter", "speculate", 4, ERROR)
    number = engine.add(request(max_tokens=40, stop="u"))
    events = [event for _ in range(3) for event in engine.step()]
    with pytest.raises(RuntimeError):
        engine.step()
    engine.cancel(number)
    events += drain(engine)
    assert [event.output.text for event in events if event.output] == ["the q"]


def test_a_request_may_end_silently():
    engine, _ = made("target", "none", 0, ERROR)
    for steps in (0, 1, 3):
        number = engine.add(request(max_tokens=40))
        for _ in range(steps):
            engine.step()
        engine.cancel(number, silent=True)
        assert not engine.has_work
    assert outputs(run(engine)[0][0])
