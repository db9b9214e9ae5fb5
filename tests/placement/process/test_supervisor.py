"""Worker processes: killed, stopped, restarted, orphaned, and those that never start."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import supervisor as supervisor_module
from ssd_jax.placement.process.placement import DraftWorker
from ssd_jax.placement.process.supervisor import Supervisor, WorkerResources
from tests.placement.process.fake_worker import command
from tests.placement.process.script import SETTINGS
from tests.placement.process.scripted import only_misses, request, run_of, text
from tests.placement.process.serving import steady_streams
from tests.placement.process.supervised import (
    ended,
    linux,
    outputs,
    speaking,
    speaking_later,
    started,
    working,
)
from tests.selection import cases
from tests.waiting import eventually


@linux
@pytest.mark.parametrize("backup", cases(["none", "ngram", "draft"], "draft"))
def test_a_worker_that_is_killed_is_started_again_and_catches_up(backup):
    with working(backup=backup) as (worker, run):
        assert only_misses(run.generate())
        pid = worker.supervisor.pid
        os.kill(pid, signal.SIGKILL)
        causes = run.until(lambda found: run.draft.counters["connections"] >= 2)
        causes += run.until(only_misses)
        assert causes["dead"] > 0
        assert run.draft.counters["dead"] > 0
        assert worker.supervisor.starts == 2
        assert worker.supervisor.pid != pid


@linux
def test_a_worker_that_dies_in_the_middle_of_a_text_joins_it_again():
    """The text goes on without it, and the new one is told all of it."""
    with working() as (worker, run):
        run.engine.add(request(0, max_tokens=500))
        for _ in range(20):
            assert not outputs(run.engine.step())
        os.kill(worker.supervisor.pid, signal.SIGKILL)
        while not run.draft.counters["dead"]:
            assert not outputs(run.engine.step())
        eventually(lambda: worker.supervisor.starts == 2)
        assert run.draft.streams.wait_ready(60)
        done = []
        while not done:
            done = outputs(run.engine.step())
        assert done[0].token_ids == text(500)
        assert {"dead", "miss"} <= {*done[0].metrics["miss_causes"]}
        run.until(only_misses)


@linux
def test_a_worker_that_is_stopped_costs_one_wait_and_goes_on_when_it_is_continued():
    with steady_streams(), working(patience=0.3) as (worker, run):
        run.until(only_misses)
        before = run.draft.counters.copy()
        os.kill(worker.supervisor.pid, signal.SIGSTOP)
        causes = run.generate(count=6)
        assert run.draft.counters["late"] == before["late"] + 1
        assert causes["stale"] > 50
        os.kill(worker.supervisor.pid, signal.SIGCONT)
        run.until(only_misses)
        assert run.draft.counters["connections"] == 1
        assert worker.supervisor.starts == 1


@linux
def test_every_thread_of_a_worker_runs_on_its_cores_alone():
    core = max(os.sched_getaffinity(0))
    with working(msgspec.structs.replace(SETTINGS, cores=(core,))) as (worker, run):
        assert only_misses(run.generate(count=1))
        tasks = list(Path(f"/proc/{worker.supervisor.pid}/task").iterdir())
        assert len(tasks) > 3
        assert all(os.sched_getaffinity(int(task.name)) == {core} for task in tasks)


@linux
def test_a_worker_is_gone_after_close():
    with working() as (worker, _):
        pid = worker.supervisor.pid
        assert not ended(pid)
    assert ended(pid)


@linux
def test_a_stopped_worker_is_gone_after_close():
    with working() as (worker, _):
        pid = worker.supervisor.pid
        os.kill(pid, signal.SIGSTOP)
    assert ended(pid)


@linux
def test_a_supervisor_that_nobody_holds_ends_its_worker():
    supervisor = Supervisor(SETTINGS, command())
    supervisor.start()
    supervisor.wait_ready()
    pid = supervisor.pid
    del supervisor
    eventually(lambda: ended(pid))


PARENT = """
import os, sys, signal
sys.path.insert(0, {root!r})
from ssd_jax.placement.process.supervisor import Supervisor
from tests.placement.process.fake_worker import command
from tests.placement.process.script import SETTINGS
supervisor = Supervisor(SETTINGS, command())
supervisor.start()
supervisor.wait_ready()
print(supervisor.pid, flush=True)
sys.stdin.readline()
{end}
"""


@linux
@pytest.mark.parametrize(
    ("end", "stopped"),
    [
        ("raise ValueError", False),
        ("sys.exit()", False),
        ("os._exit(3)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", False),
        ("os.kill(os.getpid(), signal.SIGKILL)", True),
        ("os.kill(os.getpid(), signal.SIGTERM)", False),
    ],
)
def test_no_worker_outlives_its_parent_however_that_ends(end, stopped):
    code = PARENT.format(root=str(Path(__file__).parents[3]), end=end)
    with subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert not ended(pid)
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.communicate("go on\n", timeout=300)
        eventually(lambda: ended(pid))


@linux
@pytest.mark.parametrize("end", ["sys.exit()", "supervisor = None"])
def test_a_fork_of_its_parent_leaves_the_worker_alone(end):
    fork = f"""
if os.fork() == 0:
    {end}
    sys.exit()
os.waitpid(-1, 0)
print(supervisor.pid, supervisor.starts, flush=True)
"""
    code = PARENT.format(root=str(Path(__file__).parents[3]), end=fork)
    done = subprocess.run(
        [sys.executable, "-c", code], input="go on\n", capture_output=True, text=True, timeout=300
    )
    before, after = done.stdout.splitlines()
    assert after == f"{before} 1"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("error", "ValueError: no room for the draft"),
        ("exit", "exit status 7 | the last words"),
    ],
)
def test_a_worker_that_cannot_start_says_why_in_its_own_words(how, words):
    worker = DraftWorker(SETTINGS, command=command(how))
    worker.supervisor.start()
    with pytest.raises(InputError, match="the draft worker cannot start") as raised:
        worker.supervisor.wait_ready()
    assert words in str(raised.value)
    worker.close()


@pytest.mark.more
@pytest.mark.parametrize(
    "code",
    [
        "os.write(1, b'native code says hello\\n')",
        "os.write(1, b'5\\n')",
        "print({}, flush=True)",
        "os.write(1, b'{\"address\": 5}\\n\\xff\\n' + b'[' * 100_000 + b'\\n')",
    ],
)
def test_what_others_write_before_a_worker_reports_is_no_report(code):
    worker = DraftWorker(SETTINGS, command=speaking(code))
    worker.supervisor.start()
    try:
        assert started(worker)
        assert run_of(worker.draft()).generate(count=1)
    finally:
        worker.close()


@linux
def test_what_native_code_writes_later_does_not_block_a_worker():
    """A pipe that nobody reads is full after 64 KiB."""
    code = (
        "import tests.placement.process.script as s; o = s.ScriptedDraft.open; "
        "s.ScriptedDraft.open = lambda *a: (os.write(1, b'x' * 2**20), o(*a))[1]"
    )
    with working(patience=5.0, started_by=speaking_later(code)) as (_, run):
        assert only_misses(run.generate())


def test_a_worker_that_hangs_while_it_starts_is_given_up():
    code = "print('the last words', file=sys.stderr, flush=True); time.sleep(60)"
    supervisor = Supervisor(SETTINGS, speaking(code), startup=3.0)
    supervisor.start()
    with pytest.raises(InputError, match="reported nothing within 3 s") as raised:
        supervisor.wait_ready()
    assert "the last words" in str(raised.value)
    supervisor.close()


def test_an_error_of_the_supervisors_thread_is_reported(monkeypatch):
    """Else the engine would wait for ever."""

    def broken(*_):
        raise ArithmeticError("unforeseen")

    monkeypatch.setattr(supervisor_module, "_read_report", broken)
    worker = DraftWorker(SETTINGS, command=command())
    worker.supervisor.start()
    assert started(worker)
    with pytest.raises(InputError, match="ArithmeticError: unforeseen"):
        worker.supervisor.check()
    worker.close()


@linux
def test_an_interrupt_does_not_reach_the_worker():
    with working() as (worker, run):
        run.until(only_misses)
        pid = worker.supervisor.pid
        assert os.getpgid(pid) != os.getpgid(0)  # the terminal interrupts a whole group
        os.kill(pid, signal.SIGINT)
        time.sleep(0.5)
        assert only_misses(run.generate())
        assert only_misses(run_of(worker.draft()).generate())
        assert (worker.supervisor.pid, worker.supervisor.starts) == (pid, 1)


@pytest.mark.more
def test_a_worker_imports_nothing_from_the_directory_of_the_user(tmp_path, monkeypatch):
    (tmp_path / "numpy.py").write_text("raise SystemExit('this is the wrong numpy')")
    monkeypatch.chdir(tmp_path)
    resources = WorkerResources(source=str(tmp_path / "no-model"))
    worker = DraftWorker(msgspec.structs.replace(SETTINGS, resources=resources))
    worker.supervisor.start()
    with pytest.raises(InputError, match=r"the draft worker cannot start: .*no-model"):
        worker.supervisor.wait_ready()
    worker.close()


@linux
def test_a_worker_that_hangs_is_ended_once_and_another_is_started():
    with working() as (worker, _):
        supervisor = worker.supervisor
        pid, address = supervisor.pid, supervisor.address
        os.kill(pid, signal.SIGSTOP)
        supervisor.end(address)
        assert supervisor.address is None  # nobody connects to the one that ends
        eventually(lambda: supervisor.starts == 2 and supervisor.pid not in (None, pid))
        assert ended(pid)
        second = supervisor.pid
        supervisor.end(address)  # of an engine that has not noticed yet
        time.sleep(0.3)
        assert supervisor.pid == second


def test_a_worker_whose_program_is_missing_is_an_error():
    worker = DraftWorker(SETTINGS, command=["/no/such/python"])
    worker.supervisor.start()
    with pytest.raises(InputError, match="/no/such/python: No such file"):
        worker.supervisor.wait_ready()
    worker.close()


def test_a_worker_may_be_closed_while_it_starts():
    worker = DraftWorker(SETTINGS, command=command())
    worker.supervisor.start()
    worker.close()
    worker.supervisor.wait_ready()
    assert worker.supervisor.address is None
    assert worker.supervisor.starts == 0
