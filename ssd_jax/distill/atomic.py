"""Files that are whole or absent, whatever happens while they are written."""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from ssd_jax.checkpoints.durable import sync_directory, write_file
from ssd_jax.errors import InputError


def write_atomic(path: Path, data: bytes) -> None:
    """Writes a file beside its name, has it reach the disk, and renames it.

    Raises:
      OSError: the disk is full, or cannot be written; what was there before is as it was.
    """
    partial = path.with_name(f".{path.name}.{secrets.token_hex(4)}.partial")
    try:
        write_file(partial, data)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    sync_directory(path.parent)


def clear_partial(directory: Path) -> None:
    """Removes what writers that were killed have left."""
    for partial in directory.glob(".*.partial"):
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink()


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
