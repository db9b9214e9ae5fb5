"""A worker that owes an answer for long is ended, and another is started."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import placement
from ssd_jax.placement.process.hang_limit import HANG, HangLimit
from ssd_jax.placement.process.placement import DraftWorker
from tests.placement.process.fake_worker import command
from tests.placement.process.script import SETTINGS
from tests.placement.process.scripted import only_misses, run_of
from tests.placement.process.serving import served
from tests.placement.process.stuck import stuck, unmade
from tests.placement.process.supervised import linux, working
from tests.waiting import eventually


def test_the_hang_limit_doubles_each_time_that_it_is_reached():
    watch = Watch()
    assert [watch.until_reached() for _ in range(3)] == [HANG, 2 * HANG, 4 * HANG]


class Watch:
    """A limit that is looked at every half a second."""

    def __init__(self, seconds=HANG, **more):
        self.now = 100.0
        self.limit = HangLimit(seconds, clock=lambda: self.now, **more)

    def until_reached(self, by="a"):
        began = self.now
        while not self.limit.reached(by):
            assert self.now < began + 1000, "it is never reached"
            self.now += 0.5
        return self.now - began


def test_an_overdue_answer_stays_overdue_until_it_comes_or_another_worker_owes():
    watch = Watch(10.0)
    for _ in range(10):  # over another stream, perhaps
        assert not watch.limit.reached("a")
        watch.now += 1
    assert watch.until_reached("b") == 10
    assert not watch.limit.reached("b")
    watch.limit.clear()
    watch.now += 1000
    assert not watch.limit.reached("b")


def test_a_hang_limit_counts_only_time_in_which_it_is_looked_at():
    """An engine that was idle or stopped, or a host that slept, gave a worker no chance."""
    watch = Watch(5.0)
    for _ in range(5):
        assert not watch.limit.reached("a")
        watch.now += 1000
    assert watch.limit.reached("a")


def test_a_hang_limit_shrinks_again_where_it_is_kept_with_ease():
    watch = Watch(2.0, forgets=True)
    for expected in (2, 4):
        assert watch.until_reached() == expected
    for _ in range(6):
        assert not watch.limit.reached("b")
        watch.now += 0.5
    watch.limit.clear()  # after more than 2 s: this worker needs them
    assert watch.until_reached() == 8
    assert not watch.limit.reached("c")
    watch.limit.clear()
    assert watch.until_reached() == 2


def test_a_worker_that_stays_stuck_is_ended_by_its_address_and_another_stream_opened():
    ends, go = [], threading.Event()

    def end(address):
        ends.append(address)
        go.set()

    with served(draft=stuck(go), patience=0.3, limit=HangLimit(1.0), end=end) as run:
        address = run.draft.streams._address()
        run.until(lambda found: ends and only_misses(found))
        assert ends == [address]
        assert run.draft.counters["hung"] == 1
        assert run.draft.counters["connections"] >= 2


def test_a_worker_that_never_answers_the_hello_is_ended():
    draft, end, ends = unmade()
    with served(draft=draft, limit=HangLimit(1.0), end=end) as run:
        run.until(only_misses)
        assert len(ends) == 1


@linux
def test_a_worker_process_that_hangs_is_replaced():
    with working(patience=0.3) as (worker, run):
        run.until(only_misses)
        run.draft.streams.limit = HangLimit(1.0)
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
    monkeypatch.setattr(placement, "_READY_SECONDS", 0.1)
    with working() as (worker, _):
        os.kill(worker.supervisor.pid, signal.SIGSTOP)
        draft = worker.draft()
        assert not draft.streams.refused
        assert set(run_of(draft, backup="ngram").generate(count=1)) == {"dead"}


def test_an_engine_of_another_kind_is_an_error_with_the_workers_words():
    worker = DraftWorker(SETTINGS, command=command("other"))
    worker.supervisor.start()
    try:
        worker.supervisor.wait_ready()
        with pytest.raises(InputError, match=r"does not serve: .*support is another: 3, not 2"):
            worker.draft()
    finally:
        worker.close()
