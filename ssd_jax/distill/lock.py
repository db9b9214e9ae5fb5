"""One distillation at a time in a directory."""

from __future__ import annotations

import contextlib
import fcntl
from collections.abc import Iterator
from pathlib import Path

from ssd_jax.errors import InputError


@contextlib.contextmanager
def only_one(directory: Path) -> Iterator[None]:
    """Keeps other processes out of a directory while this one works in it.

    Raises:
      InputError: another one is at work there.
    """
    with (directory / ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InputError(
                f"another ssd-jax distill is at work in {directory}; wait for it, or give "
                "another --out"
            ) from None
        yield
