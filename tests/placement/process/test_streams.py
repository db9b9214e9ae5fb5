"""Streams: how many, how large, who is let in, and which way they go."""

from __future__ import annotations

import queue
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import msgspec
import numpy as np
import pytest

from ssd_jax.placement.process import client, codec, connection, server
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.messages import Open, Refused
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.transport import METHOD, message_size, options
from ssd_jax.placement.process.transport import TOKEN as KEY
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import MAX_BIASED_IDS, MAX_STOP_CHARACTERS, MAX_STOPS, SamplingParams
from tests.placement.process.script import HELLO, SLOTS, TOKEN, ScriptedDraft
from tests.placement.process.scripted import only_misses
from tests.placement.process.serving import served
from tests.placement.process.test_session import OPEN, ROUND


@contextmanager
def serving(**settings):
    """A function that opens connections to a worker in this process."""
    opened = []
    running, address = server.serve(
        lambda called: DraftSession(HELLO, ScriptedDraft, called), HELLO, TOKEN, **settings
    )

    def connect():
        opened.append(Connection(address, HELLO, TOKEN, Counter()))
        return opened[-1]

    connect.address = address
    try:
        yield connect
    finally:
        for connection in opened:
            connection.close()
        running.stop(None)


def eventually(condition):
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it never happens"
        time.sleep(0.02)


def test_many_engines_have_streams_at_the_same_time():
    with serving() as connect:
        assert all(connect().wait_ready(60) for _ in range(20))


def test_one_stream_too_many_is_refused_in_words_and_let_in_when_another_has_ended():
    with serving(streams=2) as connect:
        first, second = connect(), connect()
        assert first.wait_ready(60)
        assert second.wait_ready(60)
        third = connect()
        assert not third.wait_ready(60)
        assert third.refused
        assert "serves 2 engines already" in third.trouble
        first.close()
        eventually(lambda: connect().wait_ready(60))


def talk(address, messages, *, limits=True):
    """Sends bytes to a worker; returns the answers that come until it ends the stream."""
    usual = options(message_size(HELLO)) if limits else ()
    with grpc.insecure_channel(address, options=usual) as channel:
        call = channel.stream_stream(METHOD)(messages, metadata=((KEY, TOKEN),), timeout=60)
        return [codec.decode(answer, HELLO) for answer in call]


def test_a_stream_without_a_hello_is_ended():
    def nothing():
        time.sleep(30)
        yield b""

    with serving(greeting=0.2, streams=1) as connect:
        (answer,) = talk(connect.address, nothing())
        assert isinstance(answer, Refused)
        assert "no Hello within" in answer.reason
        eventually(lambda: connect().wait_ready(60))


def test_a_greeting_is_waited_for_no_longer_than_its_own_time():
    """An engine that is silent afterwards keeps its stream."""
    with serving(greeting=0.1) as connect:
        connection = connect()
        assert connection.wait_ready(60)
        time.sleep(0.5)
        assert connection.alive


def test_who_is_not_known_leaves_no_heap_of_messages(monkeypatch):
    decoded = []
    read = codec.decode

    def decode(data, about):
        decoded.append(read(data, about))
        return decoded[-1]

    monkeypatch.setattr(server.codec, "decode", decode)
    with serving(greeting=60.0) as connect:
        inbox = server._Inbox(HELLO, server._Refusals())
        inbox.start(iter([codec.encode(OPEN)] * 9))
        eventually(lambda: decoded)
        time.sleep(0.1)
        assert len(decoded) == 1
        inbox.admitted.set()
        eventually(lambda: len(decoded) == 9)
        answers = talk(connect.address, iter([codec.encode(OPEN)] * 9))
        assert [type(answer) for answer in answers] == [Refused]


@pytest.mark.parametrize("metadata", [(), ((KEY, "another"),), ((KEY, TOKEN), (KEY, TOKEN))])
@pytest.mark.parametrize("said", [[], [b"no message"], [codec.encode(HELLO)]])
def test_nothing_of_a_stranger_is_read(monkeypatch, metadata, said):
    """Nor does it get a thread: no number of them keeps an engine out."""
    monkeypatch.setattr(server.codec, "decode", lambda *_: pytest.fail("a message was read"))
    asked, wait = [], threading.Event()

    def messages():
        yield from said
        wait.wait(60)

    def make(called):
        asked.append(called)
        return DraftSession(HELLO, ScriptedDraft, called)

    running, address = server.serve(make, HELLO, TOKEN, streams=1)
    with grpc.insecure_channel(address) as channel:
        for _ in range(20):
            call = channel.stream_stream(METHOD)(messages(), metadata=metadata, timeout=60)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
        wait.set()
    running.stop(None)
    assert not asked


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
@pytest.mark.parametrize("length", [10, 150])
def test_a_socket_has_no_name_and_leaves_no_file(monkeypatch, tmp_path, length):
    """Whatever becomes of the process; and its path may be longer than a socket's name may be."""
    directory = tmp_path / ("d" * length)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with serving() as connect:
        assert connect.address.startswith("unix:/proc/")
        assert list(directory.iterdir()) == []
        assert connect().wait_ready(60)


def test_where_no_socket_can_be_made_the_loopback_interface_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with serving() as connect:
        assert connect.address.startswith("127.0.0.1:")
        assert connect().wait_ready(60)


def test_a_message_that_is_larger_than_any_of_use_is_not_read():
    assert dict(options(message_size(HELLO)))["grpc.max_receive_message_length"] < 2**20
    with serving() as connect, pytest.raises(grpc.RpcError) as raised:
        talk(connect.address, iter([codec.encode(HELLO) + b"\0" * 2**20]), limits=False)
    assert raised.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_the_largest_messages_fit():
    """An opening with as many biases and stops as there may be, and the highest numbers."""
    params = SamplingParams(
        logit_bias=tuple((2**31 + token, -1e300) for token in range(MAX_BIASED_IDS)),
        stop=("\U0001f600" * (MAX_STOP_CHARACTERS // MAX_STOPS),) * MAX_STOPS,
        seed=2**64 - 1,
    )
    large = Open(number=2**62, epoch=2**31 - 1, opening=SlotOpening(1, params))
    most = dict(options(message_size(HELLO)))["grpc.max_receive_message_length"]
    assert len(codec.encode(large)) < most
    whole = np.full((SLOTS, HELLO.context), 1, np.int32)
    assert len(codec.encode(msgspec.structs.replace(ROUND, committed=whole))) < most


@pytest.mark.parametrize("name", ["http_proxy", "grpc_proxy"])
def test_no_proxy_comes_between(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with serving() as connect:
        assert connect().wait_ready(10)


class Slow(queue.SimpleQueue):
    """Gives nothing at once."""

    def get(self, *arguments, **more):
        item = super().get(*arguments, **more)
        time.sleep(0.02)
        return item


def test_a_round_has_left_when_the_targets_forward_is_dispatched(monkeypatch):
    monkeypatch.setattr(connection, "queue", SimpleNamespace(SimpleQueue=Slow))
    monkeypatch.setattr(client, "LEAVES", 60.0)
    asked, left = [], []
    with served() as run:
        expand, forward = run.draft.expand, run.target.forward

        def expanding(*arguments, **more):
            expand(*arguments, **more)
            asked.append(run.draft._link)

        def forwarding(*arguments):
            left.append([link.flush(0) for link in asked])
            asked.clear()
            return forward(*arguments)

        monkeypatch.setattr(run.draft, "expand", expanding)
        monkeypatch.setattr(run.target, "forward", forwarding)
        run.generate(count=1, size=20)
    assert len(left) > 4
    assert all(map(all, left))
    assert all(left[:-2])  # at its end a text has no branches


def test_a_message_that_does_not_leave_is_not_waited_for(monkeypatch):
    held = threading.Event()

    class Held(queue.SimpleQueue):
        def get(self, *arguments, **more):
            item = super().get(*arguments, **more)
            held.wait(60)
            return item

    monkeypatch.setattr(connection, "queue", SimpleNamespace(SimpleQueue=Held))
    with serving() as connect:
        link = connect()
        assert not link.flush(0.01)
        held.set()
        assert link.flush(60)


def test_where_streams_keep_breaking_the_next_one_waits_longer(monkeypatch):
    monkeypatch.setattr(connection, "Connection", lambda *_: object())
    monkeypatch.setattr(connection, "_RETRY", 1.0)
    now, where = [0.0], ["a"]
    connect = connection.connector(HELLO, TOKEN, lambda: where[0], Counter(), clock=lambda: now[0])

    def pauses(count):
        found = []
        while len(found) < count:
            began = now[0]
            while connect() is None:
                now[0] += 1
            found.append(now[0] - began)
        return found

    assert pauses(10) == [0, 1, 2, 4, 8, 10, 10, 10, 10, 10]
    now[0] += 100  # the last one was steady
    assert pauses(2) == [0, 1]
    where[0] = "b"  # another worker
    assert pauses(3) == [0, 1, 2]
    where[0] = None
    assert connect() is None


def test_the_engine_is_told_where_a_worker_failed(caplog):
    class Failing(ScriptedDraft):
        def open(self, *arguments):
            raise ZeroDivisionError("out of order")

    with served(draft=Failing, patience=0.2) as run:
        run.until(lambda found: "ZeroDivisionError" in run.draft.trouble)
        assert "in open" in run.draft.trouble
        assert "ended: the worker refused: ZeroDivisionError" in caplog.text
        assert not only_misses(run.generate())
