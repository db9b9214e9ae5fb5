"""Ends a process that may wait for nothing: devices may hang, and nobody read its output."""

from __future__ import annotations

import contextlib
import os
import select
import sys
import threading
from typing import NoReturn

_FLUSHED = 0.5  # seconds that whoever reads standard output has for the last of it


def leave(why: str, status: int) -> NoReturn:
    """Ends this process though programs may wait on its devices for ever, and nobody may read
    what it has said."""
    with contextlib.suppress(RuntimeError):  # Python starts no threads while it ends
        flushing = threading.Thread(target=flush, daemon=True)
        flushing.start()
        flushing.join(_FLUSHED)
    with contextlib.suppress(OSError):
        if why and select.select((), (2,), (), 0)[1]:
            os.write(2, f"ssd-jax: {why}\n".encode())
    os._exit(status)


def flush() -> None:
    """Writes what was said and is not written yet, if anybody reads it."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
