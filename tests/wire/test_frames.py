"""A connection: frames come in order, nobody waits for ever, and its end has a reason."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest

from ssd_jax.wire import frames as frames_module
from ssd_jax.wire.frames import Frames, with_length
from ssd_jax.wire.security import Files
from ssd_jax.wire.tls import Tls
from tests.waiting import eventually


@pytest.fixture
def pair():
    """Two connected ends that wait longer than any of these tests takes."""
    ends = socket.socketpair()
    for end in ends:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2**14)
    both = [Frames(end, 60) for end in ends]
    yield both
    for end in both:
        end.close()
    for end in ends:
        end.close()


def test_frames_come_as_they_were_sent(pair):
    one, other = pair
    for frame in (b"a", b"", b"b" * 100):
        one.send(frame)
    assert [other.receive() for _ in range(3)] == [b"a", b"", b"b" * 100]


def test_a_frame_that_need_not_have_left_is_not_waited_for(pair):
    """It leaves by itself, and others behind it."""
    one, other = pair
    one.start_beats(60)
    large = [bytes([number]) * 2**20 for number in range(3)]
    began = time.monotonic()
    for frame in large:
        one.send(frame, wait=False)
    assert time.monotonic() - began < 30
    assert not one.flush(0)
    assert [other.receive() for _ in large] == large
    assert one.flush(60)


def test_a_frame_that_must_leave_is_waited_for(pair):
    one, other = pair
    thread = threading.Thread(target=one.send, args=(b"x" * 2**20,))
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    assert other.receive() == b"x" * 2**20
    thread.join(60)
    assert one.flush(0)


def test_frames_of_several_threads_stay_whole(pair):
    one, other = pair
    sent = [bytes([number]) * 50_000 for number in range(20)]
    threads = [
        threading.Thread(target=one.send, args=(frame,), kwargs={"wait": bool(number % 2)})
        for number, frame in enumerate(sent)
    ]
    one.start_beats(60)
    for thread in threads:
        thread.start()
    assert sorted(other.receive() for _ in sent) == sent


@pytest.mark.parametrize("wait", [True, False])
def test_frames_that_the_other_end_does_not_take_end_the_connection(pair, wait):
    """A part may have left, which nothing else can follow."""
    one, other = pair
    one.silence, lost = 0.5, []
    one.start_beats(60, lost.append)
    if wait:
        with pytest.raises(TimeoutError):
            one.send(b"x" * 2**20)
    else:
        one.send(b"x" * 2**20, wait=False)
        eventually(lambda: lost == ["it took nothing for 0.5 s"])
    with pytest.raises(OSError, match="closed"):
        other.receive()
    assert one.end_reason(ConnectionError("later")) == "it took nothing for 0.5 s"


def test_a_frame_that_is_too_long_is_neither_sent_nor_received(pair):
    one, other = pair
    one.max_bytes = other.max_bytes = 100
    with pytest.raises(OSError, match="of 101 bytes is too long; at most 100 go"):
        one.send(b"x" * 101)
    one.send(b"x" * 100)
    assert other.receive() == b"x" * 100
    one.max_bytes = 2**20
    one.send(b"x" * 101)
    with pytest.raises(OSError, match="it has sent a message of 101 bytes; at most 100 go"):
        other.receive()


def test_silence_ends_a_connection_and_beats_do_not(pair):
    one, other = pair
    one.silence, other.silence = 0.5, 2.0
    one.start_beats(0.1)
    began = time.monotonic()
    while time.monotonic() < began + 2.5:
        assert other.receive() == b""
    with pytest.raises(TimeoutError) as raised:
        one.receive()
    assert one.end_reason(raised.value) == "it was silent for 0.5 s"


def test_a_first_frame_has_a_limit_of_its_own(pair):
    one, other = pair
    began = time.monotonic()
    one._socket.send(with_length(b"y" * 11)[:6])
    with pytest.raises(TimeoutError, match="does not answer"):
        other.receive_first(0.1, max_bytes=11)
    assert time.monotonic() - began < 30
    with pytest.raises(OSError, match="at most 10 go"):
        other.receive_first(60, max_bytes=10)


def test_a_frame_that_cannot_be_taken_is_told_of():
    ends, lost = socket.socketpair(), []
    frames = Frames(ends[0], 5.0)
    frames.start(lambda frame: {}[frame], lost.append)
    ends[1].sendall(with_length(b"odd"))
    eventually(lambda: lost)
    assert lost == ["what it has sent could not be taken: KeyError(b'odd')"]
    for end in ends:
        end.close()


def test_an_end_that_closes_hears_of_no_loss(pair):
    one, other = pair
    lost = []
    for end in pair:
        end.start(lambda _: None, lambda why, end=end: lost.append((end, why)))
    one.close()
    eventually(lambda: lost)
    time.sleep(0.1)
    assert lost == [(other, "its connection was closed")]


def test_both_ends_may_send_at_once_what_is_encrypted(files):
    """OpenSSL allows one thread at a time for a connection."""
    ends = socket.socketpair()
    of_worker = Files(cert=files["worker.cert"], key=files["worker.key"]).serving_context()
    of_engine = Files(ca=files["ca"]).engine_context()
    server = Tls(of_worker)
    client = Frames(ends[0], 60)

    def agree():
        while not server.ready:
            server.decrypt(ends[1].recv(2**16))
            ends[1].sendall(server.encrypt(b""))

    agreeing = threading.Thread(target=agree)
    agreeing.start()
    client.encrypt(Tls(of_engine, "127.0.0.1"), 60)
    agreeing.join()
    both = [client, Frames(ends[1], 60, tls=server)]
    sent = [[os.urandom(size) for size in (10, 100_000, 2**20, 3)] * 5 for _ in both]
    received = [[], []]

    def send(index):
        for frame in sent[index]:
            both[index].send(frame)

    def receive(index):
        for _ in sent[1 - index]:
            received[index].append(both[index].receive())

    threads = [
        threading.Thread(target=what, args=(index,), daemon=True)
        for index in range(2)
        for what in (send, receive)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert received == sent[::-1]
    for end in ends:
        end.close()


def test_no_lock_is_held_while_the_other_end_is_waited_for(pair):
    one, _ = pair
    threading.Thread(target=lambda: _quietly(one), daemon=True).start()
    time.sleep(0.1)
    assert one._sending.acquire(timeout=30)
    one._sending.release()


def _quietly(frames):
    try:
        frames.send(b"x" * 2**22)
    except OSError:
        return


def test_one_read_takes_a_frame_and_those_that_follow(pair):
    one, other = pair
    one.send(b"a" * 1000)
    one.send(b"b" * 1000)
    assert frames_module.READ_SIZE > 2008
    assert other.receive() == b"a" * 1000
    assert bytes(other._received[4:]) == b"b" * 1000
