"""Who does not know the token gets nothing, costs little, and keeps nobody who knows it out."""

from __future__ import annotations

import contextlib
import itertools
import socket
import struct
import threading
import time

import pytest

from ssd_jax.wire import handshake, listener, refusals
from ssd_jax.wire.frames import with_length
from ssd_jax.wire.listener import Limits
from ssd_jax.wire.stream import Stream, StreamError
from tests.waiting import eventually
from tests.wire.ends import KINDS, SIZE, TOKEN, Crowd, answer, ended, frame_of, serving


def unread(_messages):
    pytest.fail("a stranger is served")


@pytest.mark.parametrize("kind", KINDS)
def test_an_engine_that_knows_the_token_is_served(kind, files):
    with serving(kind, files=files) as server:
        assert server.asks(b"abc") == b"cba"
        assert server.asks(b"x" * SIZE) == b"x" * SIZE


@pytest.mark.parametrize("token", ["another", "", TOKEN + "x", TOKEN[:-1], "x" * 1024])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_of_a_stranger_without_the_token_are_not_read(kind, files, token, caplog):
    caplog.set_level("WARNING", logger=refusals.__name__)
    with serving(kind, unread, files=files) as server:
        for _ in range(3):
            with pytest.raises(StreamError, match=r"^its token is another$") as raised:
                server.asks(token=token)
            assert raised.value.refused
    assert sum("does not know the token" in line for line in caplog.messages) == 1
    assert not any(TOKEN in line or (token and token in line) for line in caplog.messages)


MANY, FEW = Limits(seconds=600), Limits(strangers=100, grace=0.5)


@pytest.mark.parametrize(
    ("kind", "limits"),
    [
        pytest.param("here", MANY, id="here, all have a place"),
        pytest.param("port", MANY, id="all have a place"),
        pytest.param("here", FEW, id="here, most wait for one", marks=pytest.mark.more),
        pytest.param("port", FEW, id="most wait for one"),
    ],
)
def test_strangers_that_come_again_when_they_are_cut_keep_nobody_out(kind, limits):
    with serving(kind, limits=limits) as server, Crowd(server, 150) as crowd:
        for _ in range(4):
            assert server.asks() == b"cba"
        if limits.strangers < 150:
            eventually(lambda: crowd.cut > 0)
        else:
            assert crowd.cut == 0


def test_the_oldest_stranger_makes_room_and_no_other_does():
    with serving(limits=Limits(strangers=3, grace=0.0)) as server:
        strangers = []
        for _ in range(5):
            strangers.append(server.stranger())
            frame_of(strangers[-1])
        assert [ended(stranger, 0.3) for stranger in strangers] == [True, True, False, False, False]


def test_a_stranger_has_time_to_answer_before_it_makes_room():
    with serving(limits=Limits(strangers=1, grace=5.0)) as server:
        first = server.stranger()
        hello = frame_of(first)
        others = [server.stranger() for _ in range(9)]
        time.sleep(0.2)
        first.sendall(answer(hello))
        assert frame_of(first)[:1] == b"\1"
        for other in others:
            other.close()


@pytest.mark.parametrize("kind", KINDS)
def test_strangers_get_no_thread(kind, files):
    with serving(kind, files=files) as server:
        before = threading.active_count()
        strangers = [server.stranger() for _ in range(100)]
        assert server.asks() == b"cba"
        eventually(lambda: threading.active_count() <= before)
        for stranger in strangers:
            stranger.close()


@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_says_nothing_is_ended(kind, files, caplog):
    with serving(kind, files=files, limits=Limits(seconds=0.2)) as server:
        strangers = [server.stranger() for _ in range(3)]
        assert all(ended(stranger) for stranger in strangers)
        assert sum("said nothing for 0.2 s" in line for line in caplog.messages) == 1


@pytest.mark.parametrize(
    "begun",
    [answer(b""), b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"],
    ids=["an answer", "a greeting of TLS"],
)
@pytest.mark.parametrize("kind", KINDS)
def test_a_stranger_that_never_comes_to_an_end_is_ended(kind, files, begun):
    """A slow loris."""
    with serving(kind, files=files, limits=Limits(seconds=1.5)) as server:
        stranger, began = server.stranger(), time.monotonic()
        try:
            for place in itertools.cycle(range(len(begun) - 1)):
                stranger.sendall(begun[place : place + 1])
                assert time.monotonic() < began + 60
                time.sleep(0.02)
        except OSError:
            pass
        assert server.asks() == b"cba"


NOISE = [
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",  # as engines of earlier versions began
    struct.pack("<I", 2**32 - 1),
    struct.pack("<I", 2**11),
    with_length(b""),
    with_length(b"SSD"),
    with_length(b"no answer" * 20),
    with_length(b"\xff" * 68),
]


@pytest.mark.parametrize("noise", NOISE, ids=range(len(NOISE)))
def test_a_wrong_answer_ends_a_stranger_at_once(noise, caplog):
    with serving(answers=unread, limits=MANY) as server:
        for _ in range(2):
            stranger = server.stranger()
            stranger.sendall(noise)
            assert ended(stranger)
            stranger.close()
    assert sum("127.0.0.1: it speaks another protocol" in line for line in caplog.messages) == 1


def test_a_stranger_may_not_say_more_than_any_certificate(files):
    """A greeting of 128 KiB, of which OpenSSL would keep all."""
    with serving("tls", unread, files=files, limits=MANY) as server:
        stranger = server.stranger()
        greeting = b"\x01\x01\xff\xff" + b"\0" * 5 * 2**14
        with contextlib.suppress(OSError):
            for begin in range(0, 5 * 2**14, 2**14):
                stranger.sendall(b"\x16\x03\x01\x40\x00" + greeting[begin : begin + 2**14])
        assert ended(stranger)


def test_a_replayed_handshake_is_refused():
    """Neither an engine's proof over another connection, nor the server's own."""
    with serving() as server:
        first = server.stranger()
        proof = answer(frame_of(first))
        first.sendall(proof)
        verdict = frame_of(first)
        assert verdict[:1] == b"\1"
        for greeting in (proof, with_length(proof[4:40] + verdict[1:])):
            second = server.stranger()
            frame_of(second)
            second.sendall(greeting)
            assert frame_of(second) == b"\0its token is another"


@pytest.mark.parametrize("echoes", [False, True])
def test_an_engine_says_nothing_to_a_worker_that_does_not_know_the_token(echoes):
    """Nor to one that proves it by what the engine itself has said."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        stream = Stream(f"127.0.0.1:{impostor.getsockname()[1]}", TOKEN, SIZE)
        stream.send(b"for the worker alone")
        errors = []

        def answers():
            try:
                list(stream.answers())
            except StreamError as error:
                errors.append(error)

        thread = threading.Thread(target=answers, daemon=True)
        thread.start()
        connected, _ = impostor.accept()
        hello = handshake.hello()
        connected.sendall(with_length(hello))
        proof = frame_of(connected)[-32:] if echoes else b"\0" * 32
        connected.sendall(with_length(b"\1" + proof))
        assert ended(connected)
        thread.join(60)
    (error,) = errors
    assert str(error) == "it does not know the token itself"
    assert error.refused
    assert not stream.admitted


def test_ends_of_two_versions_say_so_at_both(caplog):
    newer = handshake.VERSION + 1
    with serving(answers=unread) as server:
        stranger = server.stranger()
        stranger.sendall(answer(frame_of(stranger), version=newer))
        both = f"version {newer} of the protocol, and version {handshake.VERSION} here"
        assert both in frame_of(stranger).decode()
    assert sum(both in line for line in caplog.messages) == 1
    with socket.create_server(("127.0.0.1", 0)) as other:
        stream = Stream(f"127.0.0.1:{other.getsockname()[1]}", TOKEN, SIZE)
        threading.Thread(
            target=lambda: other.accept()[0].sendall(
                with_length(b"SSD" + bytes([newer]) + b"\0" * 32)
            )
        ).start()
        with pytest.raises(StreamError, match=f"{both}; install the same ssd_jax") as raised:
            next(stream.answers())
        assert raised.value.refused


def test_a_worker_that_can_take_no_stream_takes_the_next(monkeypatch):
    """No thread to be had, for example."""
    with serving() as server:
        start = threading.Thread.start
        failures = iter([RuntimeError("can't start new thread")])

        def failing(thread):
            for error in failures if thread.name == "stream" else ():
                raise error
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)
        with pytest.raises(StreamError):
            server.asks()
        assert server.asks() == b"cba"
        assert next(failures, None) is None


def test_an_error_with_one_stranger_concerns_no_other(monkeypatch, caplog):
    read, failures = listener._Stranger.read, iter([ArithmeticError("unforeseen")])

    def failing(stranger, secret):
        for error in failures:
            raise error
        return read(stranger, secret)

    with serving(limits=Limits(seconds=1.5)) as server:
        monkeypatch.setattr(listener._Stranger, "read", failing)
        stranger = server.stranger()
        stranger.sendall(b"x")
        assert ended(stranger)
        assert server.asks() == b"cba"
    assert "unforeseen" in caplog.text
