"""Compiled programs on disk, which JAX reads and writes instead of its own files.

JAX writes its own entries in place, so that a reader or a full disk may find them incomplete, never
replaces them, and loads them unchecked: one flipped bit may end the process at every start. Entries
here begin with a hash; one that does not match it is deleted, compiled and written again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compilation_cache

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.cache_dir import compile_cache
from ssd_jax.system.cores import compiling_cores

_LOG = logging.getLogger(__name__)
_DIGEST = hashlib.sha256().digest_size
_DAY = 86_400.0
_KEPT = 30 * _DAY  # since last use
_ELSEWHERE = "set XDG_CACHE_HOME to a directory that can be written, or give `compile_cache='off'`"


class ProgramStore:
    """A cache as JAX expects it: programs by key, in a directory that processes may share, each
    whole or absent. Programs for a processor are kept apart by the number of cores that they were
    compiled for, which JAX's keys leave out.

    A directory that cannot be written is only read, with one warning. When a process puts its first
    program, programs that were not used for 30 days are deleted.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = self._path = directory  # JAX reads the latter
        self._warned = self._cleared = False
        self._asked = threading.local()

    @contextlib.contextmanager
    def watch(self) -> Iterator[list[str]]:
        """The keys that this thread asks for within the block, in order."""
        self._asked.keys = keys = []
        try:
            yield keys
        finally:
            del self._asked.keys

    def get(self, key: str) -> bytes | None:
        """The program that was put, or None."""
        path = self._file(key)
        getattr(self._asked, "keys", []).append(key)
        try:
            kept = path.read_bytes()
            if kept[:_DIGEST] == _digest(key, kept[_DIGEST:]):
                self._note_use(path)
                return kept[_DIGEST:]
            _LOG.warning("%s is damaged; it is compiled again", path)
            path.unlink()
        except FileNotFoundError:
            pass  # nothing was put, or another process has deleted it
        except OSError as error:
            self._warn(error)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program, replacing any existing one."""
        try:
            write_file(self._file(key), _digest(key, value) + value)
        except OSError as error:
            self._warn(error)
        if not self._cleared:
            self._cleared = True
            self._clear()

    def _note_use(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # another user's, or on a read-only disk
            if _age(path) > _DAY:
                os.utime(path)

    def _clear(self) -> None:
        """Deletes programs not used for long, and what killed writers have left."""
        for pattern, longest in (("*.program", _KEPT), (".*.program.*.partial", _DAY)):
            for path in self._path.glob(pattern):
                with contextlib.suppress(OSError):
                    if _age(path) > longest:
                        path.unlink()

    def _file(self, key: str) -> Path:
        cores = f"-{compiling_cores()}-cores" if jax.default_backend() == "cpu" else ""
        return self._path / f"{key}{cores}.program"

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("compiled programs are not kept: %s; %s", error, _ELSEWHERE)
        self._warned = True


class _Nothing:
    """Stands in for a cache that must not be used."""

    _path = Path(os.devnull)

    def get(self, key: str) -> None:
        del key

    def put(self, key: str, value: bytes) -> None:
        del key, value


def open_store(setting: str) -> ProgramStore | None:
    """The store for a `Config.compile_cache`; None if nothing is kept.

    If the user's default cache cannot be made, there is none, and a warning says so.

    Raises:
      InputError: a directory that the user named cannot be used, or the setting is empty.
    """
    if not setting:
        raise InputError("compile_cache is empty; give a directory, auto or off")
    if setting == "off":
        return None
    directory = compile_cache(setting)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)  # its content will be run
        next(os.scandir(directory), None)
    except OSError as error:
        problem = f"{error.filename or directory}: {error.strerror}"
        if setting != "auto":
            raise InputError(
                f"compile_cache = {setting!r} cannot be used ({problem}); give a directory that "
                "can be written, or `compile_cache='off'`"
            ) from None
        _LOG.warning("compiled programs are not kept (%s); %s", problem, _ELSEWHERE)
        return None
    return ProgramStore(directory)


def say_unused(
    store: ProgramStore | None, setting: str, directory: Path | None, cacheable: bool
) -> None:
    """Logs a warning where a store was asked for and is not the one in use.

    Args:
      setting: as configured.
      directory: in use.
      cacheable: whether this process's programs can be read again.
    """
    if store is not None and not cacheable:
        _LOG.warning(
            "compiled programs are not kept: those of some of a TPU's devices cannot be read "
            "again (jax issue 38004)"
        )
    elif store and setting != "auto" and store.directory != directory:
        _LOG.warning(
            "compile_cache = %r is not used, but what JAX's own setting "
            "jax_compilation_cache_dir names: %s",
            setting,
            directory,
        )


def keep_programs(store: ProgramStore | None) -> Path | None:
    """Makes this process keep what it compiles from now on in a store; with None, nowhere.

    JAX has one cache per process. A cache named by the user's own JAX settings stays in use.

    Returns: the directory in use.
    """
    current = compilation_cache._cache
    own = getattr(jax.config, "jax_compilation_cache_dir", None)
    kept = kept_in()
    if own and kept is None:
        if isinstance(current, _Nothing):
            compilation_cache.reset_cache()
        return Path(own)
    wanted = None if store is None else store.directory
    if wanted == kept and not isinstance(current, _Nothing):
        return wanted
    compilation_cache.reset_cache()
    jax.config.update("jax_compilation_cache_dir", wanted and str(wanted))
    if store is not None:
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)
        _install(store)
    return wanted


def keep_nothing() -> None:
    """Makes this process neither keep nor read compiled programs in any cache, until
    `keep_programs`."""
    keep_programs(None)  # our store must not be taken for the user's own cache
    _install(_Nothing())


def _install(cache: Any) -> None:
    compilation_cache._cache = cache


def store_in_use() -> ProgramStore | None:
    """The store in use; None if nothing is kept, or the cache is the user's."""
    current = compilation_cache._cache
    return current if isinstance(current, ProgramStore) else None


def kept_in() -> Path | None:
    """The directory of the store in use."""
    store = store_in_use()
    return None if store is None else store.directory


def _age(path: Path) -> float:
    """Seconds since a file was last used, to a day."""
    return time.time() - path.stat().st_mtime


def _digest(key: str, program: bytes) -> bytes:
    return hashlib.sha256(key.encode() + b"\0" + program).digest()
