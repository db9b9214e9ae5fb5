"""Whatever becomes of the way to a worker on another host, the text is the same; counters tell."""

from __future__ import annotations

import gc
import itertools
import time
from collections import Counter
from contextlib import contextmanager

import pytest

from ssd_jax.placement.process import server as server_module
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import Connection, connector
from ssd_jax.placement.process.hang_limit import HangLimit
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.placement.remote import serving as serving_module
from tests.placement.process.script import HELLO, TOKEN
from tests.placement.process.scripted import only_misses, run_of
from tests.placement.process.serving import steady_streams
from tests.placement.remote.proxy import Proxy
from tests.placement.remote.scripted import FAR, serving

ROUND = 0.002
"""Seconds of a forward of the target, so that an engine without a draft does not spin."""
NOTICED = 25.0
"""Seconds; silence ends a stream after 2, an answer that is owed after 30."""


@contextmanager
def linked(patience=0.3, seed=0, **settings):
    """An engine, the way to its worker, and the worker."""
    server = serving(**settings)
    proxy, counters = Proxy(int(server.address.rpartition(":")[2]), seed=seed), Counter()
    where = f"127.0.0.1:{proxy.port}"
    connect = connector(HELLO, TOKEN, lambda: where, counters, link=FAR)
    streams = WorkerStreams(connect, counters, lambda: where)
    streams.silence = HangLimit(60.0, forgets=True)
    draft = RemoteDraft(HELLO, streams, patience=patience)
    servers = [server]
    try:
        assert draft.streams.wait_ready(30)
        run = run_of(draft)
        forward = run.target.forward
        run.target.forward = lambda *arguments: time.sleep(ROUND) or forward(*arguments)
        assert run.until(only_misses)["miss"] > 0
        yield run, proxy, servers
    finally:
        draft.close()
        proxy.close()
        for started in servers:
            started.stop()


def test_a_worker_that_is_killed_and_started_again_is_found_at_its_address():
    with linked() as (run, proxy, servers):
        for times in range(2):
            servers.pop().stop()
            causes = run.until(lambda found: set(found) == {"dead"})
            assert run.draft.counters["connections"] >= times + 1
            server = serving()
            servers.append(server)
            proxy.to = int(server.address.rpartition(":")[2])
            causes += run.until(only_misses)
            assert causes["miss"] > 0
        assert run.draft.counters["dead"] > 0
        assert run.draft.counters["garbage"] == 0


def test_a_way_that_is_cut_off_is_noticed_by_beats_and_found_again():
    """No end is told of it, and nothing comes: the stream ends long before an answer is overdue."""
    with linked() as (run, proxy, _):
        began = time.monotonic()
        with proxy.parted():
            causes = run.until(lambda found: set(found) == {"dead"})
        assert time.monotonic() - began < NOTICED
        assert causes["late"] > 0
        assert causes["stale"] > 0
        run.until(only_misses)
        assert run.draft.counters["connections"] >= 2
        assert run.draft.counters["hung"] == 0


def test_an_engine_whose_way_is_lost_gets_its_seat_back(monkeypatch):
    """The worker, too, finds out by beats that nobody is there any more."""
    monkeypatch.setattr(serving_module, "_ENGINE_SILENCE", 2.0)
    with linked(streams=1) as (run, proxy, _):
        proxy.abandon()
        run.until(lambda _: run.draft.counters["connections"] >= 2)
        run.until(only_misses)


@pytest.mark.more
def test_a_draft_that_nobody_holds_any_more_leaves_its_seat():
    server = serving(streams=1)
    address = server.address
    try:
        for _ in range(3):
            counters = Counter()
            connect = connector(HELLO, TOKEN, lambda: address, counters, link=FAR)
            draft = RemoteDraft(HELLO, WorkerStreams(connect, counters, lambda: address))
            assert draft.streams.wait_ready(30), draft.streams.trouble
            del draft
            gc.collect()
    finally:
        server.stop()


def test_an_engine_that_comes_while_another_leaves_waits_for_the_seat(monkeypatch):
    monkeypatch.setattr(server_module, "_LEAVE_SECONDS", 30.0)
    server = serving(streams=1)
    address = server.address
    links = [Connection(address, HELLO, TOKEN, Counter(), FAR) for _ in range(2)]
    try:
        first = next(link for link in itertools.cycle(links) if link.wait_ready(0.1))
        first.close()
        (second,) = {*links} - {first}
        assert second.wait_ready(30), second.trouble
    finally:
        for link in links:
            link.close()
        server.stop()


def test_a_way_that_stands_still_for_a_moment_costs_one_wait_and_no_stream():
    with steady_streams(), linked() as (run, proxy, _):
        before = run.draft.counters["late"]
        with proxy.parted():
            causes = run.until(lambda found: found["stale"] > 0)
        assert causes["stale"] > 0
        assert run.draft.counters["late"] == before + 1
        run.until(only_misses)
        assert run.draft.counters["connections"] == 1
        assert run.draft.counters["dead"] == 0


def test_connections_that_are_reset_are_made_again():
    with linked() as (run, proxy, _):
        for times in range(3):
            proxy.cut()
            run.until(lambda _, n=times: run.draft.counters["connections"] >= n + 2)
            run.until(only_misses)
        assert run.draft.counters["dead"] > 0


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 2))])
def test_bytes_that_are_changed_on_their_way_change_no_text(seed):
    """Plain text has no seal; what still is a message is judged like any other."""
    with linked(seed=seed) as (run, proxy, _):
        proxy.damage = 0.05
        run.until(lambda _: run.draft.counters["connections"] >= 2)
        proxy.damage = 0.0
        proxy.cut()
        run.until(only_misses)


def test_a_slow_and_lossy_way_is_measured_and_does_not_end_speculation():
    with steady_streams(), linked(patience=5.0) as (run, proxy, _):
        proxy.delay, proxy.loss = 0.005, 0.01
        sent = proxy.bytes
        run.generate(count=4, size=100)
        assert proxy.bytes > sent
        assert run.draft.counters["connections"] == 1
        assert run.draft.counters["dead"] == 0
        assert any(d.sources.get(0) == "hit" for d, _ in run.target.verified[-50:])
        assert run.draft.streams.current._work.clock.round_trip > 2 * proxy.delay
