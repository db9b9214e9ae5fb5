"""Ends processes: one that must not wait, since devices may hang and its output may go unread, and
one that nobody needs any more."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import sys
import threading
from typing import NoReturn

_FLUSH_SECONDS = 0.5  # seconds that the reader of standard output has for the rest


def leave(message: str, status: int) -> NoReturn:
    """Ends this process even if programs wait on its devices for ever and its output is not
    read."""
    with contextlib.suppress(RuntimeError):  # Python starts no threads at exit
        thread = threading.Thread(target=flush, daemon=True)
        thread.start()
        thread.join(_FLUSH_SECONDS)
    with contextlib.suppress(OSError):
        if message and select.select((), (2,), (), 0)[1]:
            os.write(2, f"ssd-jax: {message}\n".encode())
    os._exit(status)


def flush() -> None:
    """Flushes standard output and standard error, if they are read."""
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            with contextlib.suppress(OSError, ValueError):
                stream.flush()


def end_with_parent() -> None:
    """Makes this process end with the one that started it by `multiprocessing`, however that ends;
    else it would work on for minutes."""

    def wait() -> None:
        parent = multiprocessing.parent_process()
        if parent is not None:
            parent.join()
            os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
