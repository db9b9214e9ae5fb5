"""What a worker on its own does with what comes first on a stream; others are not touched."""

from __future__ import annotations

import contextlib
import threading
import time
import weakref
from collections import Counter

import msgspec
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import server
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.server import LeftError
from ssd_jax.placement.process.supervisor import WorkerResources
from ssd_jax.placement.remote import serving as serving_module
from ssd_jax.wire import codec, refusals
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import Refused, Welcome
from ssd_jax.wire.stream import Stream, StreamError
from tests.placement.process.conversation import OPEN
from tests.placement.process.script import HELLO, TOKEN
from tests.placement.remote.scripted import FAR, SIZE, serving
from tests.waiting import eventually


@pytest.fixture
def worker():
    """Its address; an engine that comes after all else is served."""
    running = serving(first_message=1.5)
    yield running.address
    link = Connection(running.address, HELLO, TOKEN, Counter(), FAR)
    try:
        assert link.wait_ready(60), link.trouble
    finally:
        link.close()
        running.stop()


def talk(address, messages, token=TOKEN):
    """Sends bytes; returns the answers that come until the stream ends."""
    stream, answers = Stream(address, token, 2 * SIZE), []
    for message in messages:
        stream.send(message)
    try:
        answers.extend(codec.decode(answer, HELLO) for answer in stream.answers())
    except StreamError as error:
        if error.refused or not stream.admitted:
            raise
    finally:
        stream.close()
    return answers


def refused(address, *messages):
    (answer,) = talk(
        address, iter([m if isinstance(m, bytes) else codec.encode(m) for m in messages])
    )
    assert isinstance(answer, Refused)
    return answer.reason


def test_a_draft_that_can_be_loaded_is_welcome_and_another_after_it_is_not(worker):
    stream = Stream(worker, TOKEN, SIZE)
    stream.send(codec.encode(HELLO))
    answers = stream.answers()
    assert codec.decode(next(answers), HELLO) == Welcome()
    stream.send(codec.encode(msgspec.structs.replace(HELLO, slots=HELLO.slots + 1)))
    assert "slots is another" in codec.decode(next(answers), HELLO).reason
    stream.close()


def test_a_stream_that_does_not_begin_with_hello_is_refused(worker):
    assert refused(worker, Welcome()) == "a Welcome before it was said what is wanted"
    assert refused(worker, OPEN).startswith(("page", "slot", "a "))
    assert "no message" in refused(worker, b"GET / HTTP/1.1")
    assert "no message" in refused(worker, codec.encode(HELLO)[:40])


def test_a_silent_stream_is_ended(worker):
    began = time.monotonic()
    (answer,) = talk(worker, [])
    assert "no message within" in answer.reason
    assert time.monotonic() < began + 60


def test_a_stream_without_the_token_is_not_read(worker):
    with pytest.raises(StreamError, match="its token is another"):
        talk(worker, [codec.encode(HELLO)], token="another")


def test_messages_larger_than_any_are_refused_before_they_are_sent_and_when_they_come(worker):
    huge = msgspec.structs.replace(HELLO, context=2**24)
    assert "are allowed; lower `slots`" in refused(worker, huge)
    assert talk(worker, [b"\0" * (SIZE + 1)]) == []


def test_each_kind_of_refusal_is_logged_once_and_no_secret_with_it(worker, caplog):
    caplog.set_level("WARNING", logger=refusals.__name__)
    for _ in range(3):
        with pytest.raises(StreamError):
            talk(worker, [b"x"], token="guessed")
        refused(worker, b"GET / HTTP/1.1")
        talk(worker, [b"\0" * (SIZE + 1)])
        talk(worker, [])
    messages = [record.getMessage() for record in caplog.records]
    whys = (
        "not know the token",
        "no message:",
        "broke off before its first message",
        "no message within",
    )
    assert len(messages) == len(whys)
    for why in whys:
        assert sum(why in line for line in messages) == 1, messages
    assert not any("guessed" in line or TOKEN in line for line in messages)


@pytest.mark.parametrize("known", [True, False])
def test_a_draft_that_cannot_be_loaded_is_an_engines_own_trouble(known):
    def load(_wanted, _gone):
        raise InputError("no such file") if known else MemoryError("out of memory")

    running = serving(load)
    try:
        reason = refused(running.address, HELLO)
        assert reason == ("no such file" if known else "MemoryError: out of memory")
    finally:
        running.stop()


def test_a_workers_words_are_shown_without_control_characters():
    def load(_wanted, _gone):
        raise InputError("\x1b[2J\x1b[31mgone\nTraceback")

    running = serving(load)
    try:
        link = Connection(running.address, HELLO, TOKEN, Counter(), FAR)
        assert not link.wait_ready(30)
        assert link.trouble == "the worker refused: \ufffd[2J\ufffd[31mgone\nTraceback"
    finally:
        running.stop()


@pytest.mark.more
def test_a_draft_without_engines_makes_room_for_another(monkeypatch):
    """Each want has weights and programs of its own; a worker serves for weeks."""
    lines, alive = [], weakref.WeakSet()

    def load_sessions(spec, resources, *, engines, copies):
        lines.append((spec.context, copies))

        def make(called):
            return None

        alive.add(make)
        return make

    monkeypatch.setattr(serving_module, "load_sessions", load_sessions)
    drafts = serving_module.Drafts(WorkerResources(source="draft"), 4)

    def wanted(context):
        return msgspec.structs.replace(HELLO, context=context)

    for context in (64, 80, 96):
        drafts.load(wanted(context))
    used = drafts.load(wanted(96))
    drafts.load(wanted(112))
    assert drafts.load(wanted(96)) is used
    assert lines == [(64, 1), (80, 1), (96, 1), (112, 2)]
    del used
    drafts.load(wanted(64))
    assert len(alive) == 1


def test_nothing_is_loaded_for_an_engine_that_left_while_it_waited(monkeypatch):
    begun, goes_on, lines = threading.Event(), threading.Event(), []

    def load_sessions(spec, resources, *, engines, copies):
        lines.append(spec.context)
        begun.set()
        assert goes_on.wait(30)
        return lambda _called: None

    monkeypatch.setattr(serving_module, "load_sessions", load_sessions)
    drafts = serving_module.Drafts(WorkerResources(source="draft"), 4)
    other = msgspec.structs.replace(HELLO, context=2 * HELLO.context)
    loading = threading.Thread(target=drafts.load, args=(HELLO,))
    loading.start()
    assert begun.wait(30)
    looks = iter([False, True])
    with pytest.raises(LeftError, match="has left before"):
        drafts.load(other, lambda: next(looks))
    goes_on.set()
    loading.join(30)
    assert lines == [HELLO.context]


def test_a_worker_sees_that_an_engine_has_left_before_it_is_answered(caplog):
    begun, seen = threading.Event(), threading.Event()

    def load(_wanted, gone):
        assert not gone()
        begun.set()
        eventually(gone)
        seen.set()
        raise LeftError("it left")

    running = serving(load)
    stream = Stream(running.address, TOKEN, SIZE)
    stream.send(codec.encode(HELLO))
    threading.Thread(target=lambda: [*_until_closed(stream)], daemon=True).start()
    assert begun.wait(30)
    stream.close()
    assert seen.wait(30)
    running.stop()
    assert not caplog.messages  # others are refused, and of them the first is named


def _until_closed(stream):
    with contextlib.suppress(StreamError):
        yield from stream.answers()


def test_a_stream_that_is_not_welcome_yet_piles_up_no_messages(monkeypatch):
    decoded, read = [], codec.decode

    def decode(data, spec):
        decoded.append(read(data, spec))
        return decoded[-1]

    monkeypatch.setattr(server.codec, "decode", decode)
    inbox = server._Inbox(server._NO_SPEC, refusals.Refusals())
    inbox.fill(iter([codec.encode(HELLO)] * 99))
    assert inbox.ended.is_set()
    assert len(decoded) == server._MAX_EARLY + 1
    with pytest.raises(ProtocolError, match="before it was welcome"):
        list(inbox.messages(1.0))


def test_a_draft_that_is_loaded_is_found_while_another_loads(monkeypatch):
    begun, goes_on = threading.Event(), threading.Event()

    def load_sessions(spec, resources, *, engines, copies):
        if spec.context != HELLO.context:
            begun.set()
            assert goes_on.wait(30)
        return lambda _called: None

    monkeypatch.setattr(serving_module, "load_sessions", load_sessions)
    drafts = serving_module.Drafts(WorkerResources(source="draft"), 4)
    loaded = drafts.load(HELLO)
    other = msgspec.structs.replace(HELLO, context=2 * HELLO.context)
    loading = threading.Thread(target=drafts.load, args=(other,))
    loading.start()
    assert begun.wait(30)
    found = []
    asking = threading.Thread(target=lambda: found.append(drafts.load(HELLO)), daemon=True)
    asking.start()
    asking.join(60)
    goes_on.set()
    loading.join(30)
    assert found == [loaded]
