"""The draft worker: `python -m ssd_jax.placement.process.main`, started by `supervisor`.

The first line of its standard input is a `WorkerSettings`, the first line of its output a
`WorkerReport`. It ends when standard input ends, that is when the process that started it ends,
however that happens.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import msgspec

from ssd_jax.errors import SsdError
from ssd_jax.placement.process.supervisor import WorkerReport, WorkerSettings
from ssd_jax.placement.visible import device_names
from ssd_jax.system.collection import collect_seldom
from ssd_jax.system.cores import pin
from ssd_jax.wire.messages import shorten

_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Runs the worker until it is no longer needed."""
    run(_start)


def run(start: Callable[[WorkerSettings], tuple[object, WorkerReport]]) -> None:
    """Runs a worker; `start` starts its server, and returns the server and the report."""
    if sys.platform == "linux":  # the worker ends with the thread that started it, even if stopped
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    collect_seldom()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the process that started this one
    output = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # output of others, native code included, must not mix with the report
    sys.stdout = sys.stderr
    settings = msgspec.json.decode(sys.stdin.buffer.readline(), type=WorkerSettings)
    if settings.cores is not None:
        pin(settings.cores)  # before JAX counts the cores for its threads
    watcher = threading.Thread(target=_exit_when_orphaned, daemon=True)
    watcher.start()
    server = None  # lives as long as it is referenced
    try:
        server, report = start(settings)
    except SsdError as error:
        report = WorkerReport(error=shorten(error))
    except Exception as error:
        traceback.print_exc()
        report = WorkerReport(error=shorten(f"{type(error).__name__}: {error}"))
    with output:
        output.write(msgspec.json.encode(report) + b"\n")
    if server is not None:
        watcher.join()
    sys.stderr.flush()
    os._exit(server is None)


def _start(settings: WorkerSettings) -> tuple[object, WorkerReport]:
    # JAX is imported after the cores are set, and starts with the claimed devices.
    from ssd_jax.placement.process.loading import load_sessions
    from ssd_jax.placement.process.server import serve

    spec, resources = settings.spec, settings.resources
    if resources.devices is not None:
        resources.devices.claim()
    sessions = load_sessions(spec, resources, urgent=settings.urgent)
    server = serve(sessions, spec, settings.token)
    return server, WorkerReport(address=server.address, devices=device_names())


def _exit_when_orphaned() -> None:
    while os.read(0, 1):  # not the stream, which an exit must not find locked
        pass
    os._exit(0)


if __name__ == "__main__":
    main()
