"""Files and directories that are whole or absent, whatever happens during writing.

Each is written beside its place, as `.NAME.HEX.partial`, and renamed at the end. An error removes
what was written and keeps what was there before; a killed writer leaves the `.partial`, a directory
until the next writer of the same. Files have the mode given by the user's umask, unless they are
for their owner alone.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import functools
import glob
import io
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # constants of Linux


@contextlib.contextmanager
def new_file(
    path: Path, *, durable: bool = False, mode: int = 0o666
) -> Iterator[io.BufferedRandom]:
    """Lets a block write a file, which takes its place at the end of the block.

    Args:
      path: path of the file; its directory exists.
      durable: whether the bytes reach the disk before the name does, and the name before the end,
        so that a power cut, too, leaves the old file or the new one.
      mode: permissions of the file, of which the user's umask takes some away.

    Raises:
      OSError: the disk is full, or cannot be written; with the name of the file.
    """
    partial = _temporary_name(path, "partial")
    try:
        opener = functools.partial(os.open, mode=mode)
        with errors_name_path(path), open(partial, "x+b", opener=opener) as file:
            yield file
            if durable:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
    if durable:
        _sync(path.parent)


def write_file(path: Path, data: bytes, *, durable: bool = False, mode: int = 0o666) -> None:
    """Writes a file. See `new_file`."""
    with new_file(path, durable=durable, mode=mode) as file:
        file.write(data)


@contextlib.contextmanager
def new_directory(directory: Path, *, durable: bool = False) -> Iterator[Path]:
    """Lets a block fill a directory, which takes its place at the end of the block.

    A directory that is already there is atomically swapped with it, and removed. If the system or
    its disk cannot do that, the old one is first moved aside, as `.NAME.HEX.old`: a writer killed
    between the two steps leaves it there, whole, until the next one has written.

    Args:
      directory: to be written; its parents are created. A symbolic link stays, and the directory
        that it leads to is written.
      durable: see `new_file`.

    Raises:
      OSError: the disk is full, or cannot be written; with the name of a file or directory.
    """
    directory = directory.resolve()
    _clear_abandoned(directory)
    new = _temporary_name(directory, "new")
    partial = new.with_suffix(".partial")
    new.mkdir(parents=True)
    lock = os.open(new, os.O_RDONLY)
    _try_lock(lock)  # until this writer ends, however it does
    new.rename(partial)  # which is never without its lock
    try:
        with errors_name_path(directory):
            yield partial
        if durable:
            for path in sorted(partial.rglob("*"), reverse=True):
                _sync(path)
            _sync(partial)
        if not _exchange(partial, directory):
            old = _temporary_name(directory, "old") if directory.exists() else None
            if old is not None:
                directory.rename(old)
            try:
                partial.rename(directory)
            except OSError:
                if old is not None:
                    old.rename(directory)
                raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)
        os.close(lock)
    if durable:
        _sync(directory.parent)
    _remove(directory.parent, rf"{re.escape(directory.name)}\.[0-9a-f]{{8}}\.old")


def clear_partial(directory: Path) -> None:
    """Removes what killed writers have left in a directory; no writer may be at work there."""
    _remove(directory, r".*\.partial")


def _clear_abandoned(directory: Path) -> None:
    """Removes what killed writers of a directory have left; others may be at work on theirs."""
    for path in directory.parent.glob(f".{glob.escape(directory.name)}.????????.partial"):
        with contextlib.suppress(OSError):  # it has gone, or is another's
            descriptor = os.open(path, os.O_RDONLY)
            try:
                if _try_lock(descriptor):
                    shutil.rmtree(path, ignore_errors=True)
            finally:
                os.close(descriptor)


def _try_lock(descriptor: int) -> bool:
    """Whether this process has the lock now; some disks have no locks."""
    with contextlib.suppress(OSError):
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    return False


def _remove(directory: Path, pattern: str) -> None:
    for path in list(directory.glob(".*")):
        if not re.fullmatch(rf"\.{pattern}", path.name):
            continue
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            path.unlink()


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names; returns False if one does not exist, or the system or disk cannot."""
    rename = getattr(ctypes.CDLL(None), "renameat2", None)
    names = os.fsencode(first), os.fsencode(second)
    return rename is not None and not rename(
        _AT_FDCWD, names[0], _AT_FDCWD, names[1], _RENAME_EXCHANGE
    )


@contextlib.contextmanager
def errors_name_path(path: Path) -> Iterator[None]:
    """Gives errors of an open file, which have no name, that of its place."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def _temporary_name(path: Path, ending: str) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.{ending}")


def _sync(path: Path) -> None:
    """Flushes a file, or the names in a directory, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
