"""What goes wrong with a worker process: it is sent a signal, upon which it breaks."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path

_ROOT = Path(__file__).parents[3]
SIGNALS = {
    "killed": signal.SIGKILL,
    "hung": signal.SIGSTOP,
    "port-shut": signal.SIGUSR1,
    "fd-starved": signal.SIGUSR2,
}
"""By fault: what brings it about in a worker of `command`."""


def command() -> list[str]:
    """What starts a draft worker that can break; see `placement.process.supervisor.COMMAND`."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r});"
        "from tests.placement.process import faults; faults.install();"
        "from ssd_jax.placement.process.main import main; main()"
    )
    return [sys.executable, "-P", "-c", code]


def install() -> None:
    """Makes this process break when it is told to."""
    signal.signal(SIGNALS["port-shut"], lambda *_: _shut(_open_files(), lambda _: True))
    signal.signal(SIGNALS["fd-starved"], lambda *_: _starve())


def _open_files() -> list[int]:
    return [int(path.name) for path in Path("/proc/self/fd").iterdir()]


def _shut(files: list[int], which: Callable[[socket.socket], bool]) -> None:
    for file in files:
        with contextlib.suppress(OSError):  # no socket, or closed meanwhile
            found = socket.socket(fileno=file)
            try:
                if which(found):
                    found.shutdown(socket.SHUT_RDWR)
            finally:
                found.detach()


def _starve() -> None:
    """No file more can be opened, and the streams that there are end."""
    import resource

    def is_stream(found: socket.socket) -> bool:
        return not found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)

    files = _open_files()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    _shut(files, is_stream)
