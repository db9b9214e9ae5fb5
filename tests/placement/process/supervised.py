"""Engines over supervised worker processes, and what starts workers that misbehave."""

from __future__ import annotations

import sys
import threading
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process.placement import DraftWorker
from tests.placement.process.fake_worker import command
from tests.placement.process.script import SETTINGS
from tests.placement.process.scripted import run_of

linux = pytest.mark.skipif(sys.platform != "linux", reason="processor cores and /proc of Linux")


@contextmanager
def working(settings=SETTINGS, *, patience=10.0, backup="none", started_by=None):
    """An engine over a supervised worker process, which a command starts."""
    worker = DraftWorker(settings, patience=patience, command=started_by or command())
    try:
        worker.supervisor.start()
        worker.supervisor.wait_ready()
        yield worker, run_of(worker.draft(), backup=backup)
    finally:
        worker.close()


def outputs(events):
    return [event.output for event in events if event.output is not None]


def ended(pid):
    """Whether a process has ended; one that nobody has buried counts."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    return stat.rpartition(")")[2].split()[0] == "Z"


def speaking(code):
    """A worker that first runs `code`, in a process that has imported only os and sys."""
    program, switch, text = command()
    return [program, switch, text.replace("import sys;", f"import os, sys, time; {code};", 1)]


def started(worker):
    """Waits for a start or a failure, and not for ever."""

    def wait():
        with suppress(InputError):
            worker.supervisor.wait_ready()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    waiting.join(60)
    return not waiting.is_alive()


def speaking_later(code):
    """A worker that runs `code` when this package can be imported."""
    program, switch, text = command()
    return [program, switch, text.replace("from tests.", f"import os; {code}\nfrom tests.", 1)]
