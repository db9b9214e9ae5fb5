"""Whatever becomes of a worker process, there is a draft again; the log says why, once."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
from collections import Counter

import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import connection
from ssd_jax.placement.process import supervisor as supervisor_module
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import connector
from ssd_jax.placement.process.hang_limit import HangLimit
from ssd_jax.placement.process.placement import DraftWorker
from ssd_jax.placement.process.supervisor import Supervisor
from ssd_jax.placement.process.worker_streams import WorkerStreams
from tests.placement.process import faults, recovery, strangers
from tests.placement.process.fake_worker import command
from tests.placement.process.script import HELLO, SETTINGS, TOKEN
from tests.placement.process.scripted import only_misses, run_of
from tests.placement.process.serving import served
from tests.placement.process.stuck import unmade
from tests.placement.process.supervised import (
    ended,
    linux,
    speaking,
    speaking_later,
    started,
    working,
)
from tests.selection import cases

BREAKABLE = "from tests.placement.process import faults; faults.install()"


@linux
@pytest.mark.parametrize("fault", cases(["port-shut", "fd-starved", "hung"], "port-shut"))
def test_a_worker_that_lives_and_hears_nobody_is_replaced(fault, caplog):
    with working(patience=0.3, started_by=speaking_later(BREAKABLE)) as (worker, run):
        run.until(only_misses)
        pid = worker.supervisor.pid
        os.kill(pid, faults.SIGNALS[fault])
        run.until(lambda found: worker.supervisor.starts == 2 and only_misses(found))
        assert ended(pid)
        assert run.draft.counters["hung"] == 1
        messages = [record.getMessage() for record in caplog.records]
        assert len(messages) == len(set(messages)) <= 4
        assert sum("gives no sign of life" in line for line in messages) == 1


class Deaf:
    """A listener that accepts connections and says nothing."""

    def __enter__(self):
        self._socket = socket.create_server(("127.0.0.1", 0))
        return f"127.0.0.1:{self._socket.getsockname()[1]}"

    def __exit__(self, *_):
        self._socket.close()


def silent_draft(address, ends):
    """A draft that takes a worker for silent after a quarter of a second."""
    counters = Counter()
    connect = connector(HELLO, TOKEN, address, counters)
    streams = WorkerStreams(connect, counters, address, None if ends is None else ends.append)
    streams.silence = HangLimit(0.25, forgets=True)
    return RemoteDraft(HELLO, streams)


def looks(draft, seconds):
    """Looks for a connection for a while, as rounds do."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not draft.counters["hung"]:
        draft.streams.usable()
        time.sleep(0.01)


def test_a_worker_that_accepts_and_is_silent_is_ended():
    ends = []
    with Deaf() as address:
        draft = silent_draft(lambda: address, ends)
        looks(draft, 30)
        draft.close()
        assert ends == [address]


def test_a_silent_worker_that_is_not_ours_to_end_is_mentioned_once(caplog):
    with Deaf() as address:
        draft = silent_draft(lambda: address, None)
        for times in (1, 2):
            while draft.counters["hung"] < times:
                draft.streams.usable()
                time.sleep(0.01)
        draft.close()
    messages = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert sum("no sign of life; another stream is tried" in line for line in messages) == 1


def test_a_worker_that_nobody_waits_for_any_more_is_let_go():
    assert not WorkerStreams(lambda: None, Counter()).wait_ready(1e9, until=lambda: True)


def test_a_draft_that_comes_after_its_worker_was_closed_is_closed(monkeypatch):
    worker = DraftWorker(SETTINGS, command=command())
    monkeypatch.setattr(worker.supervisor, "close", lambda: None)

    def ready(_streams, _timeout, until):
        worker.close()
        return until()

    monkeypatch.setattr(WorkerStreams, "wait_ready", ready)
    ended = []
    monkeypatch.setattr(RemoteDraft, "close", lambda self: ended.append(self))
    assert worker.draft() in ended


def test_a_worker_that_is_not_there_is_not_ended():
    """Another is being started: that takes as long as it takes."""
    ends = []
    draft = silent_draft(lambda: None, ends)
    looks(draft, 1)
    assert ends == []


def test_a_worker_that_refuses_is_not_ended():
    """It lives, and may serve others."""
    ends = []
    with served(token=TOKEN) as run:
        address = run.draft.streams._address()
        draft = silent_draft(lambda: address, ends)
        draft.streams.limit, draft.streams.silence = HangLimit(1.0), HangLimit(1.0, forgets=True)
        draft.streams.connect = connector(HELLO, "another", lambda: address, draft.counters)
        looks(draft, 3)
        assert draft.streams.trouble.startswith("the worker refused")
        draft.close()
    assert ends == []


def test_a_worker_that_is_heard_may_take_its_time_to_make_a_draft():
    go = threading.Event()
    slow, end, ends = unmade(go)
    with served(draft=slow, limit=HangLimit(60.0), silence=HangLimit(1.0), end=end) as run:
        looks(run.draft, 2)
        assert run.draft.streams.current.stream.admitted
        assert not run.draft.streams.current.ready
        go.set()
        assert run.draft.streams.wait_ready(60)
        run.until(only_misses)
    assert ends == []


def test_an_answer_that_is_owed_is_owed_over_many_streams(monkeypatch):
    """Else a worker whose streams break would never be replaced."""
    monkeypatch.setattr(connection, "_RETRY", 1e-3)
    draft, end, ends = unmade()
    with served(draft=draft, limit=HangLimit(60.0), end=end) as run:
        run.draft.streams.limit = HangLimit(1.0)
        give_up = time.monotonic() + 60
        while not ends:
            assert time.monotonic() < give_up
            run.draft.streams.usable()
            time.sleep(0.05)
            if run.draft.streams.current is not None:
                run.draft.streams.current.close()  # whatever breaks it
        assert run.draft.counters["connections"] >= 4
        assert run.draft.counters["hung"] == 1


def test_streams_that_break_for_one_reason_are_told_of_once(monkeypatch, caplog):
    monkeypatch.setattr(connection, "_RETRY", 1e-3)
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"  # where nobody listens
        draft = silent_draft(lambda: address, [])
        draft.streams.silence = HangLimit(60.0)
        end = time.monotonic() + 60
        while draft.counters["connections"] < 4:
            assert time.monotonic() < end
            draft.streams.usable()
            time.sleep(0.01)
        draft.close()
    assert len([record for record in caplog.records if record.levelno >= logging.WARNING]) == 1


def once(tmp_path, code):
    """A worker that runs `code` the first time that it is started."""
    mark = tmp_path / "mark"
    return speaking(
        f"m = {str(mark)!r}; there = os.path.exists(m); open(m, 'w').close(); there or {code}"
    )


def test_a_worker_that_dies_while_it_starts_is_started_once_more(tmp_path, caplog):
    worker = DraftWorker(SETTINGS, command=once(tmp_path, "os.kill(os.getpid(), 9)"))
    worker.supervisor.start()
    try:
        assert started(worker)
        assert worker.supervisor.starts == 1
        assert "the draft worker is gone (it ended with signal 9" in caplog.text
        assert run_of(worker.draft()).generate(count=1)
    finally:
        worker.close()


def test_a_worker_that_dies_twice_while_it_starts_is_an_error(tmp_path):
    died = tmp_path / "died"
    code = f"open({str(died)!r}, 'a').write('x'); os._exit(3)"
    supervisor = Supervisor(SETTINGS, speaking(code))
    supervisor.start()
    with pytest.raises(InputError, match="cannot start: it ended with exit status 3"):
        supervisor.wait_ready()
    assert died.read_text() == "xx"
    supervisor.close()


def test_a_worker_that_says_why_it_cannot_start_is_not_started_again(monkeypatch):
    runs = []

    def run(*arguments):
        runs.append(arguments)
        return supervisor_module._End("no such model", final=True)

    monkeypatch.setattr(supervisor_module, "_run", run)
    supervisor = Supervisor(SETTINGS)
    supervisor.start()
    with pytest.raises(InputError, match="no such model"):
        supervisor.wait_ready()
    assert len(runs) == 1


def test_pauses_grow_while_workers_die_at_once_and_the_log_says_so_once(monkeypatch, caplog):
    pauses, lives = [], iter([10.0, 0, 0, 0, 10.0, 10.0, 0])

    def run(state, *_):
        try:
            served = next(lives)
        except StopIteration:
            state.closing = True
            served = 0.0
        state.starts += 1
        return supervisor_module._End("it ended", served=served)

    monkeypatch.setattr(supervisor_module, "_run", run)
    state = supervisor_module._State()
    monkeypatch.setattr(state.changed, "wait_for", lambda found, pause: pauses.append(pause))
    supervisor_module._watch(state, SETTINGS, command(), 1.0)
    first = supervisor_module._FIRST_PAUSE
    assert pauses == [first * factor for factor in (1, 2, 4, 8, 1, 1, 2)]
    warned = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warned) == 3  # one for each death of a steady one


def test_a_worker_that_is_started_again_is_urgent(monkeypatch):
    """The first time, every program is compiled before the first round is measured."""
    urgent = []

    def run(state, settings, *_):
        urgent.append(settings.urgent)
        state.starts += len(urgent) > 1  # the first one dies while it starts
        state.closing = len(urgent) == 4
        return supervisor_module._End("it ended")

    monkeypatch.setattr(supervisor_module, "_run", run)
    monkeypatch.setattr(supervisor_module, "_FIRST_PAUSE", 0.0)
    supervisor_module._watch(supervisor_module._State(), SETTINGS, command(), 1.0)
    assert urgent == [False, False, True, True]


@linux
def test_an_engine_that_is_stopped_for_long_finds_its_worker_alive():
    """Both are stopped, as by a debugger or a host that sleeps."""
    with working(patience=0.3) as (worker, run):
        run.until(only_misses)
        os.kill(worker.supervisor.pid, signal.SIGSTOP)
        time.sleep(4.0)  # nobody looks
        os.kill(worker.supervisor.pid, signal.SIGCONT)
        run.until(only_misses)
        assert worker.supervisor.starts == 1


@pytest.mark.slow
@linux
@pytest.mark.parametrize("kind", strangers.KINDS)
def test_thousands_of_strangers_cost_an_engine_nothing(kind):
    core, memory, _, lost = strangers.cost(kind, 2500)
    assert core < 2500 * 1e-3
    assert memory < 32 * 2**20
    assert lost == {}


@pytest.mark.slow
@linux
@pytest.mark.parametrize("fault", faults.SIGNALS)
def test_speculation_is_back_soon_after_a_fault(fault):
    (times,) = recovery.measure([fault], 3).values()
    assert sorted(times)[1] < 20
