"""Streams of each kind: order, sizes, signs of life, ends, addresses."""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import tempfile
import threading
import time

import pytest

from ssd_jax.wire import sockets
from ssd_jax.wire import stream as streams
from ssd_jax.wire.stream import Stream, StreamError
from tests.waiting import eventually
from tests.wire.ends import KINDS, SIZE, TOKEN, ended, serving


@contextlib.contextmanager
def opened(server, token=TOKEN):
    stream = server.open(token)
    try:
        yield stream
    finally:
        stream.close()


@pytest.mark.parametrize("kind", KINDS)
def test_messages_come_in_order_also_those_from_before_the_stream_is_open(kind, files):
    with serving(kind, files=files) as server, opened(server) as stream:
        stream.send(b"1a")
        stream.send(b"2a")
        assert not stream.admitted
        answers = stream.answers()
        found = [next(answers)]
        assert stream.admitted
        stream.send(b"3a")
        found += [next(answers), next(answers)]
        assert found == [b"a1", b"a2", b"a3"]
        assert stream.flush(60)


def test_unsent_messages_are_reported_and_not_waited_for():
    with serving() as server, opened(server) as stream:
        stream.send(b"x")
        began = time.monotonic()
        assert not stream.flush(0.05)
        assert time.monotonic() - began < 30
        next(stream.answers())
        assert stream.flush(60)


def test_an_engine_does_not_wait_for_a_worker_that_takes_nothing(monkeypatch):
    monkeypatch.setattr(streams, "SILENCE", 60.0)
    go = threading.Event()

    def answers(messages):
        yield next(messages)
        go.wait(60)
        yield from messages

    with serving(answers=answers) as server, opened(server) as stream:
        stream.send(b"first")
        came = stream.answers()
        next(came)
        began = time.monotonic()
        for _ in range(16):
            stream.send(b"x" * SIZE)
        assert time.monotonic() - began < 30
        assert not stream.flush(0)
        go.set()
        assert all(len(next(came)) == SIZE for _ in range(16))
        assert stream.flush(60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_message_that_is_larger_than_any_of_use_is_not_read(kind, files):
    with serving(kind, files=files) as server:
        with opened(server) as stream:
            stream._size = 2 * SIZE  # of what it says itself
            stream.send(b"x" * (SIZE + 1))
            with pytest.raises(StreamError, match=r"closed|reset|pipe"):
                next(stream.answers())
        assert server.asks() == b"cba"


def test_an_answer_that_is_larger_than_any_of_use_is_not_taken():
    with serving(answers=lambda messages: (m * 2 for m in messages)) as server:
        stream = Stream(server.address, TOKEN, 8)
        stream.send(b"12345")
        with pytest.raises(StreamError, match="a message of 10 bytes; at most 8 go"):
            next(stream.answers())
        stream.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_worker_that_gives_no_sign_of_life_is_given_up(monkeypatch, kind, files):
    monkeypatch.setattr(streams, "SILENCE", 1.5)
    monkeypatch.setattr(streams, "BEAT", 0.05)
    with serving(kind, files=files) as server, opened(server) as lives:
        lives.send(b"a")
        answers = lives.answers()
        assert next(answers) == b"a"
        with opened(server) as other:
            monkeypatch.setattr(streams, "BEAT", 60.0)  # of its worker's end
            other.send(b"b")
            silent = other.answers()
            assert next(silent) == b"b"
            with pytest.raises(StreamError, match=r"^it was silent for 1.5 s$"):
                next(silent)
        lives.send(b"c")
        assert next(answers) == b"c"


def test_a_worker_may_be_silent_for_longer_while_it_loads(monkeypatch):
    monkeypatch.setattr(streams, "SILENCE", 0.2)
    monkeypatch.setattr(streams, "BEAT", 60.0)

    def slow(messages):
        time.sleep(0.5)
        yield next(messages)
        list(messages)

    with serving(answers=slow) as server, opened(server) as stream:
        stream.send(b"a")
        answers = stream.answers()
        assert next(answers) == b"a"
        with pytest.raises(StreamError, match="silent"):
            next(answers)


def test_an_engine_that_gives_no_sign_of_life_gives_up_its_place(monkeypatch):
    left = threading.Event()

    def answers(messages):
        try:
            yield from messages
        finally:
            left.set()

    with serving(answers=answers, silence=1.5) as server, opened(server) as stream:
        monkeypatch.setattr(streams, "BEAT", 0.1)
        stream.send(b"a")
        came = stream.answers()
        next(came)
        time.sleep(2.0)
        assert not left.is_set()
        monkeypatch.setattr(stream._frames, "send", lambda *_, **__: None)
        assert left.wait(60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_that_is_closed_ends_at_both_ends(kind, files):
    left = threading.Event()

    def answers(messages):
        try:
            yield from messages
        finally:
            left.set()

    with serving(kind, answers, files=files) as server:
        stream = server.open(TOKEN)
        stream.send(b"a")
        came = stream.answers()
        next(came)
        threading.Timer(0.1, stream.close).start()
        with pytest.raises(StreamError):
            next(came)
        assert left.wait(60)


@pytest.mark.parametrize("kind", KINDS)
def test_a_server_that_stops_ends_its_streams_and_strangers(kind, files):
    with serving(kind, files=files) as server:
        stream = server.open(TOKEN)
        stream.send(b"a")
        came = stream.answers()
        next(came)
        stranger = server.stranger()
    with pytest.raises(StreamError, match="its connection was closed"):
        next(came)
    assert ended(stranger)
    with pytest.raises(StreamError):
        server.asks()


def test_a_stream_that_is_closed_while_nobody_answers_ends_at_once():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stream = Stream(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN, SIZE)
        threading.Timer(0.1, stream.close).start()
        began = time.monotonic()
        with pytest.raises(StreamError):
            next(stream.answers())
        assert time.monotonic() - began < streams._HANDSHAKE


def test_a_worker_that_does_not_answer_is_waited_for_no_longer_than_it_may(monkeypatch):
    monkeypatch.setattr(streams, "_HANDSHAKE", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        stream = Stream(f"127.0.0.1:{silent.getsockname()[1]}", TOKEN, SIZE)
        with pytest.raises(StreamError, match="it does not answer"):
            next(stream.answers())


def test_threads_end_with_their_streams():
    before = threading.active_count()
    with serving() as server:
        for _ in range(5):
            server.asks()
    eventually(lambda: threading.active_count() <= before)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc of Linux")
@pytest.mark.parametrize("length", [10, 150])
def test_a_socket_has_no_name_and_leaves_no_file(monkeypatch, tmp_path, length):
    """Whatever becomes of the process; and its path may be longer than a socket's name may be."""
    directory = tmp_path / ("d" * length)
    directory.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(directory))
    with serving("here") as server:
        assert server.address.startswith("unix:/proc/")
        assert list(directory.iterdir()) == []
        assert server.asks() == b"cba"


def test_where_no_socket_can_be_made_the_loopback_interface_serves(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "missing"))
    with serving("here") as server:
        assert server.address.startswith("127.0.0.1:")
        assert server.asks() == b"cba"


def test_a_place_in_a_full_queue_is_waited_for():
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as listening:
        name = f"\0ssd-jax-test-{os.getpid()}"  # of the whole machine
        listening.bind(name)
        listening.listen(0)
        address = f"unix:{name}"
        first = sockets.connect(address, 1)
        with pytest.raises(BlockingIOError):
            sockets.connect(address, 0.05)
        threading.Timer(0.1, listening.accept).start()
        sockets.connect(address, 60).close()
        first.close()
