"""A worker that owes an answer for long is ended, and another is started."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ssd_jax.errors import InputError
from ssd_jax.runtime.worker import placement
from ssd_jax.runtime.worker.hang import HANG, HangLimit
from ssd_jax.runtime.worker.placement import DraftWorker
from tests.runtime.worker.fake_worker import command
from tests.runtime.worker.scripted import ScriptedDraft, only_misses, run_of
from tests.runtime.worker.serving import served
from tests.runtime.worker.test_faults import Stuck
from tests.runtime.worker.test_supervisor import SETTINGS, eventually, linux, working


def test_the_limit_is_twice_as_long_each_time_that_it_is_reached():
    now = [100.0]
    limit = HangLimit(clock=lambda: now[0])
    for seconds in (HANG, 2 * HANG, 4 * HANG):
        limit.owed()
        now[0] += seconds - 1
        assert not limit.reached()
        now[0] += 1
        assert limit.reached()
    limit.owed()
    assert not limit.reached()


def test_a_worker_that_stays_stuck_is_ended_by_its_address_and_another_stream_opened():
    Stuck.go.clear()
    ends = []

    def end(address):
        ends.append(address)
        Stuck.go.set()

    with served(draft=Stuck, patience=0.1, limit=HangLimit(0.3), end=end) as run:
        address = run.draft._connection.address
        run.until(lambda found: ends and only_misses(found))
        assert ends == [address]
        assert run.draft.counters["hung"] == 1
        assert run.draft.counters["connections"] >= 2


def test_a_worker_that_never_answers_the_hello_is_ended():
    ends, go = [], threading.Event()

    class Silent(ScriptedDraft):
        def __init__(self):
            go.wait(60)
            super().__init__()

    def end(address):
        ends.append(address)
        go.set()

    with served(draft=Silent, limit=HangLimit(0.3), end=end) as run:
        run.until(only_misses)
        assert len(ends) == 1


@linux
def test_a_worker_process_that_hangs_is_replaced():
    with working(patience=0.2) as (worker, run):
        run.until(only_misses)
        run.draft._limit = HangLimit(0.5)
        pid = worker.supervisor.pid
        os.kill(pid, signal.SIGSTOP)
        run.until(lambda found: worker.supervisor.starts == 2 and only_misses(found))
        assert worker.supervisor.pid not in (None, pid)
        assert worker.counters["hung"] == 1
        assert worker.counters["starts"] == 2


@linux
def test_an_engine_that_comes_while_the_worker_is_started_again_waits_for_it():
    with working() as (worker, _):
        os.kill(worker.supervisor.pid, signal.SIGKILL)
        eventually(lambda: worker.supervisor.address is None or worker.supervisor.starts == 2)
        assert only_misses(run_of(worker.draft()).generate())


@linux
def test_an_engine_that_comes_while_there_is_no_worker_runs_without(monkeypatch):
    monkeypatch.setattr(placement, "_GREETING", 0.1)
    with working() as (worker, _):
        os.kill(worker.supervisor.pid, signal.SIGSTOP)
        draft = worker.draft()
        assert not draft.refused
        assert set(run_of(draft, backup="ngram").generate(count=1)) == {"dead"}


def test_an_engine_of_another_kind_is_an_error_with_the_workers_words():
    worker = DraftWorker(SETTINGS, command=command("other"))
    worker.start()
    try:
        worker.wait_ready()
        with pytest.raises(InputError, match=r"does not serve: .*support is another: 3, not 2"):
            worker.draft()
    finally:
        worker.close()
