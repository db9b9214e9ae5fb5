"""Streams to a worker of this host: how many, and what an engine does when there is none."""

from __future__ import annotations

import threading
import time
from collections import Counter

import msgspec
import numpy as np

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
from ssd_jax.wire import codec
from ssd_jax.wire.messages import Open, Refused
from ssd_jax.wire.stream import Stream, StreamError, message_size
from tests.fakes.instrument import instrument
from tests.placement.process.conversation import RECORDS
from tests.placement.process.script import HELLO, SLOTS, TOKEN, ScriptedDraft
from tests.placement.process.scripted import only_misses
from tests.placement.process.serving import connecting, served
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


def talk(address, *messages):
    """Sends bytes to a worker; returns the answers that come until the stream ends."""
    stream = Stream(address, TOKEN, 2**20)
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
    with serving(first_message=0.2, streams=1) as connect:
        (answer,) = talk(connect.address)
        assert isinstance(answer, Refused)
        assert "no message within" in answer.reason
        eventually(lambda: connect().wait_ready(60))


def test_a_greeting_is_waited_for_no_longer_than_its_own_time():
    """An engine that is silent afterwards keeps its stream."""
    with serving(first_message=1.0) as connect:
        connection = connect()
        assert connection.wait_ready(60)
        time.sleep(1.5)
        assert connection.alive


def test_where_the_engine_gets_no_thread_the_draft_is_away_until_it_does(monkeypatch, caplog):
    def start(self):
        raise RuntimeError("can't start new thread")

    with serving() as worker:
        connect = connection.connector(HELLO, TOKEN, lambda: worker.address, Counter())
        streams = WorkerStreams(connect, Counter())
        with monkeypatch.context() as none_left:
            none_left.setattr(threading.Thread, "start", start)
            assert streams.usable() is None
        assert streams.wait_ready(60)
        assert "can't start new thread" in caplog.text
        streams.close()


def test_who_sees_that_a_worker_refuses_sees_why(monkeypatch):
    made, refused = threading.Event(), []

    def printable(trouble):
        if "token" in trouble:  # of no other connection, which may end meanwhile
            made.wait(60)
            refused.append(link.refused)
        return trouble

    monkeypatch.setattr(connection, "printable", printable)
    with serving() as worker:
        link = connection.Connection(worker.address, HELLO, "another", Counter())
        made.set()
        eventually(lambda: link.refused)
        assert "its token is another" in link.trouble
        assert refused == [False]


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
    ids = np.full((SLOTS, HELLO.context), 1, np.int32)
    assert len(codec.encode(msgspec.structs.replace(RECORDS, committed=ids))) < most


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
    failing = {"open": ZeroDivisionError("out of order")}
    with served(draft=lambda: instrument(ScriptedDraft(), fail=failing), patience=0.2) as run:
        message = "ended: the worker refused: ZeroDivisionError"
        run.until(lambda found: message in caplog.text)
        assert "draft.open(" in run.draft.streams.trouble
        assert not only_misses(run.generate())
