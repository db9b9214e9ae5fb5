"""Streams of one host: how many, how large, who is let in, and signs of life."""

from __future__ import annotations

import contextlib
import socket
import sys
import tempfile
import threading
import time
from collections import Counter

import msgspec
import numpy as np
import pytest

from ssd_jax.placement.process import connection, server
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.roles.records import SlotOpening
from ssd_jax.sampling.params import (
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_BIASED_IDS,
    MAX_STOP_CHARACTERS,
    MAX_STOPS,
    SamplingParams,
)
from ssd_jax.wire import codec, local, refusals
from ssd_jax.wire.local import LocalStream
from ssd_jax.wire.messages import Open, Refused
from ssd_jax.wire.stream import StreamError, message_size
from tests.placement.process.script import HELLO, SLOTS, TOKEN, ScriptedDraft
from tests.placement.process.scripted import only_misses
from tests.placement.process.serving import connecting, served
from tests.placement.process.test_session import ROUND
from tests.waiting import eventually


def serving(**settings):
    """See `connecting`."""
    running = server.serve(
        lambda called: DraftSession(HELLO, ScriptedDraft, called), HELLO, TOKEN, **settings
    )
    return connecting(running.address, running.stop)


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


def talk(address, *messages, token=TOKEN, size=2**30):
    """Sends bytes to a worker; returns the answers that come until the stream ends."""
    stream = LocalStream(address, token, size)
    for message in messages:
        stream.send(message)
    answers = []
    try:
        answers.extend(codec.decode(answer, HELLO) for answer in stream.answers())
    except StreamError:
        return answers
    finally:
        stream.close()


def test_a_stream_without_a_hello_is_ended():
    with serving(greeting=0.2, streams=1) as connect:
        (answer,) = talk(connect.address)
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


@pytest.mark.parametrize("said", [[], [b"no message"], [codec.encode(HELLO)]])
@pytest.mark.parametrize("token", ["another", "", TOKEN + "x", "x" * 1024])
def test_nothing_of_a_stranger_is_read(monkeypatch, caplog, token, said):
    read, asked = codec.decode, []
    monkeypatch.setattr(server.codec, "decode", lambda *_: pytest.fail("a message was read"))
    caplog.set_level("WARNING", logger=refusals.__name__)

    def make(called):
        asked.append(called)
        return DraftSession(HELLO, ScriptedDraft, called)

    running = server.serve(make, HELLO, TOKEN, streams=1)
    for _ in range(3):
        stream = LocalStream(running.address, token, 2**20)
        for each in said:
            stream.send(each)
        answers = stream.answers()
        assert read(next(answers), HELLO) == Refused(reason="its token is another")
        with pytest.raises(StreamError):
            next(answers)
        stream.close()
    running.stop()
    assert not asked
    assert sum("does not know the token" in line for line in caplog.messages) == 1


def test_no_number_of_strangers_keeps_an_engine_out():
    """Connections that say nothing: the oldest make room."""
    with serving() as connect:
        strangers = []
        while len(strangers) < 3 * local._STRANGERS:
            with contextlib.suppress(BlockingIOError):  # they come faster than they are taken
                strangers.append(local._connected(connect.address))
        eventually(lambda: connect().wait_ready(5))
        for stranger in strangers:
            stranger.close()


def test_a_token_of_any_length_takes_no_memory():
    with serving() as connect:
        stranger = local._connected(connect.address)
        stranger.sendall((2**31).to_bytes(4, "little"))
        stranger.settimeout(5)
        assert stranger.recv(1) == b""
        assert connect().wait_ready(60)


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
    assert message_size(HELLO) < 2**20
    with serving() as connect:
        assert talk(connect.address, codec.encode(HELLO) + b"\0" * 2**20) == []
        assert connect().wait_ready(60)


def test_an_answer_that_is_larger_than_any_of_use_is_not_taken():
    with serving() as connect:
        stream = LocalStream(connect.address, TOKEN, 8)
        stream._frames.most = 2**20  # of what it says itself
        stream.send(codec.encode(HELLO))
        stream._frames.most = 8
        with pytest.raises(StreamError, match="at most 8 go"):
            list(stream.answers())


def test_a_worker_that_gives_no_sign_of_life_is_given_up(monkeypatch):
    monkeypatch.setattr(local, "_SILENCE", 0.4)
    monkeypatch.setattr(local, "_BEAT", 0.05)
    with serving() as connect:
        lives = connect()
        assert lives.wait_ready(60)
        monkeypatch.setattr(local, "_BEAT", 60.0)
        silent = connect()
        assert silent.wait_ready(60)
        eventually(lambda: not silent.alive)
        assert silent.trouble == "the stream broke: it was silent for 0.4 s"
        assert lives.alive


def test_what_a_worker_does_not_take_ends_the_stream(monkeypatch):
    """A part of a message may have left."""
    monkeypatch.setattr(local, "_SILENCE", 0.3)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        stream = LocalStream(f"127.0.0.1:{deaf.getsockname()[1]}", TOKEN, 2**26)
        for _ in range(3):
            stream.send(b"x" * 2**25)
        with pytest.raises(StreamError):
            list(stream.answers())


def test_a_worker_that_can_take_no_stream_takes_the_next(monkeypatch):
    """No thread to be had, for example."""
    with serving() as connect:
        start = threading.Thread.start
        failures = iter([RuntimeError("can't start new thread")])

        def failing(thread):
            for error in failures if thread.name.endswith("(_serve)") else ():
                raise error
            start(thread)

        monkeypatch.setattr(threading.Thread, "start", failing)
        refused = connect()
        eventually(lambda: not refused.alive)
        assert connect().wait_ready(60)
        assert next(failures, None) is None


def test_where_the_engine_gets_no_thread_the_draft_is_away_until_it_does(monkeypatch, caplog):
    def start(self):
        raise RuntimeError("can't start new thread")

    with serving() as worker:
        connect = connection.connector(HELLO, TOKEN, lambda: worker.address, Counter())
        streams = WorkerStreams(connect, Counter())
        with monkeypatch.context() as none_left:
            none_left.setattr(threading.Thread, "start", start)
            assert streams.usable() is None
        assert streams.wait_ready(10)
        assert "can't start new thread" in caplog.text
        streams.close()


def test_the_largest_messages_fit():
    """An opening with as many biases, stops and bad words as may be, and the highest numbers."""
    params = SamplingParams(
        logit_bias=tuple((2**31 + token, -1e6 / 3) for token in range(MAX_BIASED_IDS)),
        stop=("\U0001f600" * (MAX_STOP_CHARACTERS // MAX_STOPS),) * MAX_STOPS,
        bad_words=("\U0001f600" * (MAX_STOP_CHARACTERS // MAX_BAD_WORDS),) * MAX_BAD_WORDS,
        seed=2**64 - 1,
    )
    words = [[2**31 - 1] * MAX_BAD_WORD_TOKENS] * MAX_BAD_WORDS
    opening = SlotOpening(1, params, bad_word_ids=words)
    large = Open(number=2**62, epoch=2**31 - 1, opening=opening)
    most = message_size(HELLO)
    assert len(codec.encode(large)) < most
    whole = np.full((SLOTS, HELLO.context), 1, np.int32)
    assert len(codec.encode(msgspec.structs.replace(ROUND, committed=whole))) < most


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
        run.until(lambda found: "ZeroDivisionError" in run.draft.streams.trouble)
        assert "in open" in run.draft.streams.trouble
        assert "ended: the worker refused: ZeroDivisionError" in caplog.text
        assert not only_misses(run.generate())
