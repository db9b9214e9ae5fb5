"""Times of a worker whose clock is another: its work lies where the engine's clock has it."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace

import pytest

from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import connector
from ssd_jax.placement.process.work_log import WorkerClock
from ssd_jax.placement.process.worker_streams import WorkerStreams
from tests.placement.process.script import HELLO, TOKEN
from tests.placement.process.scripted import run_of
from tests.placement.remote.scripted import FAR, serving


def answer(sent, received=None, number=7):
    return SimpleNamespace(
        number=number, sent=sent, received=sent if received is None else received
    )


def test_times_are_those_of_the_fastest_answer_lately():
    clock = WorkerClock(shared=False)
    assert clock.record_answer(answer(100.0), 3.0) == -97
    assert clock.record_answer(answer(110.0), 12.5) == -97.5
    assert clock.record_answer(answer(120.0), 23.0) == -97.5


def test_a_clock_is_shared_until_an_answer_contradicts_it(monkeypatch):
    """At the end of a tunnel on this host is another host."""
    monkeypatch.setattr(time, "perf_counter", lambda: 2.0)
    for sent, received, contradicts in ((2.9, 2.1, False), (3.1, 2.1, True), (2.9, 1.9, True)):
        clock = WorkerClock(shared=True)
        clock.record_request(7)
        later = clock.record_answer(answer(sent, received), 3.0)
        assert later == (pytest.approx(3.0 - sent) if contradicts else 0)


def test_a_round_trip_leaves_out_what_the_worker_did(monkeypatch):
    clock = WorkerClock(shared=False)
    assert clock.round_trip is None
    for asked, received, sent, now in ((1.0, 50.0, 53.0, 4.5), (5.0, 60.0, 60.5, 5.75)):
        monkeypatch.setattr(time, "perf_counter", lambda asked=asked: asked)
        clock.record_request(7, first=True)
        clock.record_answer(answer(sent, received), now)
        clock.record_answer(answer(sent, received, number=6), now)  # of an earlier round
    assert clock.round_trip == pytest.approx(0.25)


@pytest.mark.parametrize(("shared", "ahead"), [(False, 12345.0), (True, 12345.0), (True, -20.0)])
def test_work_is_told_in_the_engines_time(shared, ahead):
    """Believing a clock that is ahead would put all work at the moment when it is told."""
    server = serving(ahead=ahead)
    counters = Counter()
    link = FAR._replace(shares_clock=shared)
    connect = connector(HELLO, TOKEN, lambda: server.address, counters, link=link)
    streams = WorkerStreams(connect, counters, lambda: server.address)
    draft = RemoteDraft(HELLO, streams, patience=30.0)
    spans = []
    measured = draft.activity

    def activity():
        found = measured()
        spans.extend((span, time.perf_counter()) for span in found.spans)
        return found

    draft.activity = activity
    began = time.perf_counter()
    try:
        assert draft.streams.wait_ready(30)
        run = run_of(draft, backup="none")
        assert run.generate()["miss"] > 0
    finally:
        draft.close()
        server.stop()
    assert len(spans) > 10
    assert all(began - 0.5 < span.begin <= span.end <= now for span, now in spans)
    assert any(span.end > span.begin for span, _ in spans)
