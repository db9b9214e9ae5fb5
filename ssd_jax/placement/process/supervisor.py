"""Starts a draft worker, watches it, restarts it when it dies, and leaves none behind."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
import subprocess
import sys
import sysconfig
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, NamedTuple

import msgspec

from ssd_jax.errors import InputError
from ssd_jax.placement.process.connection import Link
from ssd_jax.placement.visible import PROCESSOR, Devices
from ssd_jax.system.cache_dir import StoreSettings
from ssd_jax.system.forks import only_in_owner
from ssd_jax.wire.draft_spec import DraftSpec

COMMAND = (sys.executable, "-P", "-m", "ssd_jax.placement.process.main")
"""Command of a worker, which imports nothing from the current directory."""
STARTUP = 1800.0
"""Seconds that a worker may take to load and compile."""
_LOG = logging.getLogger(__name__)
_FIRST_PAUSE, _LONGEST_PAUSE = 0.1, 30.0  # seconds before a dead worker is restarted
_STEADY = 2.0  # seconds of being ready after which a worker's death counts as chance
_LAST_LINES = 20
_LONGEST_LINE = 2**16  # bytes
_REMINDER = 60.0  # seconds between warnings while a worker starts
_ROOT = str(Path(__file__).parents[3])  # the directory that this package is in


class WorkerResources(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker loads a draft from, and with.

    Attributes:
      source: of the draft.
      target: source of the target, if the draft takes tensors from it; else None.
      store: where programs are stored; None keeps none.
      devices: devices that JAX is to start with; None is its default.
    """

    source: str
    target: str | None = None
    store: StoreSettings | None = None
    devices: Devices | None = PROCESSOR


class WorkerSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker process is started with.

    Attributes:
      token: secret that opening a stream requires.
      cores: cores to run on; None leaves the choice to the system.
      urgent: whether an engine waits: the programs for the most branches are then loaded first,
        those for fewer and for just-in-time drafts once the worker is ready.
    """

    token: str
    spec: DraftSpec
    resources: WorkerResources
    cores: tuple[int, ...] | None = None
    urgent: bool = False


class WorkerReport(msgspec.Struct, omit_defaults=True):
    """A worker's first line: once it is ready, its address and the devices that it sees; else what
    went wrong."""

    address: str = ""
    devices: tuple[str, ...] = ()
    error: str = ""


@dataclasses.dataclass
class _State:
    """State that the supervisor and its watching thread share.

    Attributes:
      changed: guards all others.
      address: address of the worker, while it is ready.
      devices: devices that the last ready worker saw.
      failure: why the first worker did not start.
      starts: number of workers that have become ready.
    """

    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    process: subprocess.Popen[bytes] | None = None
    address: str | None = None
    devices: tuple[str, ...] = ()
    failure: str | None = None
    starts: int = 0
    closing: bool = False


class _End(NamedTuple):
    """The end of a worker.

    Attributes:
      final: whether another would end the same way.
      served: seconds that it was ready.
    """

    why: str
    final: bool = False
    served: float = 0.0


class Supervisor:
    """A worker process, from `start` to `close`, the end of this process or garbage collection.

    Args:
      settings: settings of the worker.
      command: the command to run.
      startup: seconds after which a worker that has reported nothing is given up.
    """

    def __init__(
        self,
        settings: WorkerSettings,
        command: Sequence[str] = COMMAND,
        *,
        startup: float = STARTUP,
    ) -> None:
        self._settings, self._command, self._startup = settings, tuple(command), startup
        self.link = Link()
        self._state = _State()
        self._end = weakref.finalize(self, only_in_owner(_end), self._state)

    def start(self) -> None:
        """Starts the worker; returns at once."""
        # The thread must outlive the worker, which Linux ends with the thread that started it.
        threading.Thread(
            target=_watch,
            args=(self._state, self._settings, self._command, self._startup),
            name="draft worker",
            daemon=True,
        ).start()

    def wait_ready(self) -> None:
        """Waits until the worker is ready.

        Raises:
          InputError: it cannot start; the message is the worker's.
        """
        state, began = self._state, time.monotonic()

        def is_decided() -> bool:
            return bool(state.starts or state.failure or state.closing)

        with state.changed:
            while not state.changed.wait_for(is_decided, _REMINDER):
                pid = None if state.process is None else state.process.pid
                waited = time.monotonic() - began
                _LOG.warning("the draft worker (process %s) is not ready after %.0f s", pid, waited)
        self.check()

    def check(self) -> None:
        """Raises: InputError: the worker could not start, in its words. Does not wait."""
        if self._state.failure is not None:
            raise InputError(f"the draft worker cannot start: {self._state.failure}")

    def hold(self) -> None:
        """Nothing: a worker process keeps its draft."""

    def take_stream(self) -> None:
        """None: a worker process reports by itself that it is ready."""

    def end(self, address: str) -> None:
        """Ends the hanging worker that listens at an address; another is started."""
        state = self._state
        with state.changed:
            if state.address == address and state.process is not None:
                state.address = None
                state.process.kill()

    @property
    def address(self) -> str | None:
        """Where the worker listens; None while there is none."""
        return self._state.address

    @property
    def devices(self) -> tuple[str, ...]:
        """Devices that the worker reports to see, such as gpu:1."""
        return self._state.devices

    @property
    def pid(self) -> int | None:
        """Process id of the worker, while it is ready."""
        process = self._state.process
        return None if process is None or self._state.address is None else process.pid

    @property
    def starts(self) -> int:
        """Number of workers that have become ready so far."""
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
        process.kill()  # it has nothing to save, and a stopped one would not react to less
        process.wait()


def _watch(state: _State, settings: WorkerSettings, command: Sequence[str], startup: float) -> None:
    """Runs one worker after another; the first may die once before it is ready."""
    pause, logged, has_retried = _FIRST_PAUSE, "", False
    while True:
        try:
            end = _run(state, settings, command, startup)
        except Exception as error:  # such as no thread available: counts as the worker's end
            end = _End(f"{type(error).__name__}: {error}", final=True)
            if state.process is not None:
                state.process.kill()
                state.process.wait()
        with state.changed:
            state.address = None
            if state.closing:
                return
            if not state.starts and (end.final or has_retried):
                state.failure = end.why
                state.changed.notify_all()
                return
            has_retried = True
            if end.served > _STEADY:
                pause, logged = _FIRST_PAUSE, ""
            level = logging.DEBUG if end.why == logged else logging.WARNING
            _LOG.log(level, "the draft worker is gone (%s); starting another", end.why)
            logged = end.why
            if state.changed.wait_for(lambda: state.closing, pause):
                return
        pause = min(2 * pause, _LONGEST_PAUSE)
        settings = msgspec.structs.replace(settings, urgent=bool(state.starts))


def _environment(devices: Devices | None) -> dict[str, str]:
    environment = {**os.environ}
    if devices is not None and devices.platform == "cpu":  # whatever the target runs on
        environment["JAX_PLATFORMS"] = "cpu"
    if _ROOT not in sysconfig.get_paths().values():  # found in any case
        paths = [_ROOT, *filter(None, [environment.get("PYTHONPATH")])]
        environment["PYTHONPATH"] = os.pathsep.join(paths)
    return environment


def _run(state: _State, settings: WorkerSettings, command: Sequence[str], startup: float) -> _End:
    """Runs one worker to its end."""
    began = time.monotonic()
    with state.changed:
        if state.closing:
            return _End("closed")
        try:
            process = state.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=_environment(settings.resources.devices),
                start_new_session=True,  # an interrupt from the terminal is meant for this process
            )
        except OSError as error:
            return _End(f"{command[0]}: {error.strerror}", final=True)
    assert process.stdin is not None
    assert process.stdout is not None
    assert process.stderr is not None
    last_lines: deque[str] = deque(maxlen=_LAST_LINES)
    reader = threading.Thread(target=_read_lines, args=(process.stderr, last_lines), daemon=True)
    reader.start()
    limit = threading.Timer(startup, process.kill)
    limit.daemon = True
    limit.start()
    report = WorkerReport()
    with contextlib.suppress(OSError):  # it has already ended
        process.stdin.write(msgspec.json.encode(settings) + b"\n")
        process.stdin.flush()
        report = _read_report(process.stdout, last_lines)
    ready = time.monotonic()
    if report.address:
        limit.cancel()
        with state.changed:
            state.address, state.starts = report.address, state.starts + 1
            state.devices = report.devices
            state.changed.notify_all()
    status = process.wait()
    served = time.monotonic() - ready if report.address else 0.0
    overdue = not report.address and ready >= began + startup
    limit.cancel()
    with state.changed:
        state.address = None
    reader.join(timeout=5.0)  # its last words may still be on their way
    for pipe in (process.stdin, process.stdout):
        with contextlib.suppress(OSError):  # of what was not read
            pipe.close()
    if report.error:
        return _End(report.error, final=True)
    end = f"it ended with {f'signal {-status}' if status < 0 else f'exit status {status}'}"
    if overdue:
        end = f"process {process.pid} reported nothing within {startup:.0f} s and was killed"
    return _End(" | ".join([end, *last_lines]), final=overdue, served=served)


def _read_report(output: IO[bytes], last_lines: deque[str]) -> WorkerReport:
    """The worker's report, empty if it ends without one; lines before it go to `last_lines`."""
    while line := output.readline(_LONGEST_LINE):
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            report = msgspec.json.decode(line, type=WorkerReport)
            if report.address or report.error:
                return report
        last_lines.append(line.decode(errors="replace").rstrip())
    return WorkerReport()


def _read_lines(output: IO[bytes], last_lines: deque[str]) -> None:
    with output:
        for line in output:
            last_lines.append(line.decode(errors="replace").rstrip())
