"""Starts a draft worker, watches it, starts it again when it dies, and leaves none behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.runtime.worker.settings import WorkerSettings

COMMAND = (sys.executable, "-m", "ssd_jax.runtime.worker.main")
_LOG = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0  # seconds before a worker that died is started again
_STEADY = 60.0  # seconds that a worker lives before its death is taken for chance
_LAST_LINES = 20


@dataclasses.dataclass
class _State:
    """What supervisor and watching thread share.

    Attributes:
      changed: guards all others.
      port: of the worker, while it is ready.
      failure: why the first one did not start.
      starts: workers that have become ready.
    """

    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    process: subprocess.Popen[bytes] | None = None
    port: int | None = None
    failure: str | None = None
    starts: int = 0
    closing: bool = False


class Supervisor:
    """A worker process, from `start` to `close`, the end of this process, or its own garbage.

    Args:
      settings: of the worker.
      command: what to run.
    """

    def __init__(self, settings: WorkerSettings, command: Sequence[str] = COMMAND) -> None:
        self._settings, self._command = settings, tuple(command)
        self._state = _State()
        self._end = weakref.finalize(self, _end, self._state)

    def start(self) -> None:
        """Starts the worker; returns at once."""
        # The thread outlives the worker: Linux ends the worker with the thread that started it.
        threading.Thread(
            target=_watch,
            args=(self._state, self._settings, self._command),
            name="draft worker",
            daemon=True,
        ).start()

    def wait_ready(self) -> None:
        """Waits until the worker is ready.

        Raises:
          InputError: it cannot start, with its own words.
        """
        state = self._state
        with state.changed:
            state.changed.wait_for(lambda: state.starts or state.failure or state.closing)
            if state.failure is not None:
                raise InputError(f"the draft worker cannot start: {state.failure}")

    @property
    def address(self) -> str | None:
        """Where the worker listens; None while there is none."""
        port = self._state.port
        return None if port is None else f"127.0.0.1:{port}"

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while it is ready."""
        process = self._state.process
        return None if process is None or self._state.port is None else process.pid

    @property
    def starts(self) -> int:
        """Workers that have become ready so far."""
        return self._state.starts

    def close(self) -> None:
        """Ends the worker."""
        self._end()


def _end(state: _State) -> None:
    with state.changed:
        state.closing = True
        process = state.process
        state.changed.notify_all()
    if process is not None:
        process.kill()  # it has nothing to save; a stopped one would hear nothing gentler
        process.wait()


def _watch(state: _State, settings: WorkerSettings, command: Sequence[str]) -> None:
    """Runs one worker after another."""
    pause = _FIRST_PAUSE
    while True:
        began = time.monotonic()
        failure = _run(state, settings, command)
        with state.changed:
            state.port = None
            if state.closing:
                return
            if not state.starts:
                state.failure = failure
                state.changed.notify_all()
                return
            if time.monotonic() - began > _STEADY:
                pause = _FIRST_PAUSE
            _LOG.warning("the draft worker is gone (%s); starting another", failure)
            if state.changed.wait_for(lambda: state.closing, pause):
                return
        pause = min(2 * pause, _LONGEST_PAUSE)


def _run(state: _State, settings: WorkerSettings, command: Sequence[str]) -> str:
    """Runs one worker to its end; returns why it ended."""
    # The draft of this placement runs on the host, beside whatever the target runs on.
    environment = {**os.environ, "JAX_PLATFORMS": "cpu"}
    with state.changed:
        if state.closing:
            return "closed"
        try:
            process = state.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
            )
        except OSError as error:
            return f"{command[0]}: {error.strerror}"
    assert process.stdin is not None
    assert process.stdout is not None
    last: deque[str] = deque(maxlen=_LAST_LINES)
    words = threading.Thread(target=_keep_last, args=(process, last), daemon=True)
    words.start()
    told: dict[str, Any] = {}
    try:
        process.stdin.write(settings.to_json().encode() + b"\n")
        process.stdin.flush()
        line = process.stdout.readline()
        told = json.loads(line) if line else {}
    except (OSError, ValueError) as error:
        told = {"error": f"it reported nothing that can be read: {error}"}
        process.kill()
    if "port" in told:
        with state.changed:
            state.port, state.starts = told["port"], state.starts + 1
            state.changed.notify_all()
    status = process.wait()
    with state.changed:
        state.port = None
    words.join(timeout=1.0)
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what was not read
            pipe.close()
    if "error" in told:
        return told["error"]
    end = f"signal {-status}" if status < 0 else f"exit status {status}"
    return " | ".join([f"it ended with {end}", *last])


def _keep_last(process: subprocess.Popen[bytes], last: deque[str]) -> None:
    assert process.stderr is not None
    with process.stderr as stream:
        for line in stream:
            last.append(line.decode(errors="replace").rstrip())
