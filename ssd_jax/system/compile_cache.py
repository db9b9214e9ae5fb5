"""Compiled programs on disk: a store that is trusted, whose entries are whole or absent.

Reading a program runs what its entry says. So an entry is only read from a directory, and a file,
that this user owns and nobody else can write; or, with a secret, if it carries an HMAC of it.
"""

from __future__ import annotations

import contextlib
import hmac
import logging
import os
import stat
import time
from pathlib import Path

import jax
from jax.experimental.compilation_cache import compilation_cache as jax_cache

from ssd_jax.errors import InputError
from ssd_jax.system.atomic import write_file
from ssd_jax.system.cache_dir import StoreSettings, compile_cache
from ssd_jax.system.cores import compiling_cores
from ssd_jax.system.paths import user_path
from ssd_jax.system.secret_files import read_secret

_LOG = logging.getLogger(__name__)
_DIGEST = 32  # bytes of an HMAC
_DAY = 86_400.0
_UNUSED = 30 * _DAY  # until a program is deleted
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_ELSEWHERE = "set XDG_CACHE_HOME to a directory that can be written, or give `compile_cache='off'`"
_REMEDY = (
    "chmod 700 a directory of your own, give another one, or `compile_cache_secret`, a file with a "
    "secret that all who share the directory have"
)


class ProgramStore:
    """Programs by key, in a directory that processes may share, each whole or absent.

    Programs for a processor are kept apart by the number of cores that they were compiled for, and
    programs with an HMAC by their secret. A directory that cannot be written is only read, with one
    warning. When a process puts its first program, programs that were not used for 30 days are
    deleted.

    Args:
      settings: that open the same store elsewhere.
      secret: of the entries; empty if their owner is trusted.
    """

    def __init__(self, directory: Path, secret: str = "", settings: StoreSettings | None = None):
        self.directory = directory
        self.settings = settings or StoreSettings(str(directory))
        self._secret = secret.encode()
        self._of_secret = f"-{self._digest(b'name')[:8].hex()}" if secret else ""
        self._warned = self._cleared = False

    def get(self, key: str) -> bytes | None:
        """The program that was put, or None."""
        path = self._file(key)
        try:
            problem, entry = self._read(path)
            value = entry[_DIGEST:]
            if problem is None and not hmac.compare_digest(
                entry[:_DIGEST], self._digest(path.name.encode(), value)
            ):
                problem = "is damaged, or another wrote it"
            if problem is None:
                self._note_use(path)
                return value
            _LOG.warning("%s %s; it is compiled again", path, problem)
            path.unlink()
        except FileNotFoundError:
            pass  # nothing was put, or another process has deleted it
        except OSError as error:
            self._warn(error)
        return None

    def put(self, key: str, value: bytes) -> None:
        """Stores a program, replacing any existing one."""
        path = self._file(key)
        try:
            entry = self._digest(path.name.encode(), value) + value
            write_file(path, entry, mode=0o666 if self._secret else 0o600)
        except OSError as error:
            self._warn(error)
        if not self._cleared:
            self._cleared = True
            self._clear()

    def _read(self, path: Path) -> tuple[str | None, bytes]:
        """Why an entry is not trusted; and what it holds, if it is read."""
        with open(path, "rb", opener=_without_waiting) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                return "is no file", b""
            if not self._secret and (problem := _not_trusted(status)):
                return problem, b""
            return None, file.read()

    def _digest(self, *parts: bytes) -> bytes:
        return hmac.digest(self._secret, b"\0".join(parts), "sha256")

    def _note_use(self, path: Path) -> None:
        with contextlib.suppress(OSError):  # another user's, or on a read-only disk
            if _age(path) > _DAY:
                os.utime(path)

    def _clear(self) -> None:
        """Deletes programs not used for long, and what killed writers have left."""
        for pattern, longest in (("*.program", _UNUSED), (".*.program.*.partial", _DAY)):
            for path in self.directory.glob(pattern):
                with contextlib.suppress(OSError):
                    if _age(path) > longest:
                        path.unlink()

    def _file(self, key: str) -> Path:
        cores = f"-{compiling_cores()}-cores" if jax.default_backend() == "cpu" else ""
        return self.directory / f"{key}{self._of_secret}{cores}.program"

    def _warn(self, error: OSError) -> None:
        if not self._warned:
            _LOG.warning("compiled programs are not kept: %s; %s", error, _ELSEWHERE)
        self._warned = True


def open_store(settings: StoreSettings) -> ProgramStore | None:
    """The store of some settings; None if nothing is stored.

    If the user's default cache cannot be used, there is none, and a warning says so.

    Raises:
      InputError: a directory that the user named cannot be used or is not trusted, a setting is
        empty, or there is no secret in the file.
    """
    setting, file = settings
    if not setting:
        raise InputError("compile_cache is empty; give a directory, auto or off")
    if setting == "off":
        if file is not None:
            raise InputError(
                f"compile_cache_secret = {file!r} means nothing with compile_cache = 'off'; leave "
                "out one"
            )
        return None
    if file is not None:
        file = str(user_path(file).absolute())
    secret = "" if file is None else read_secret(file, "compile_cache_secret")
    directory = compile_cache(setting)
    try:
        directory.mkdir(mode=0o777 if secret else 0o700, parents=True, exist_ok=True)
        next(os.scandir(directory), None)
        problem, remedy = None if secret else _not_trusted(directory.stat()), _REMEDY
        if problem is not None:
            problem = f"{directory} {problem}, and reading a compiled program runs it"
    except OSError as error:
        problem = f"{error.filename or directory}: {error.strerror}"
        remedy = "give a directory that can be written, or `compile_cache='off'`"
    if problem is None:
        return ProgramStore(directory, secret, StoreSettings(str(directory), file))
    if setting != "auto":
        raise InputError(f"compile_cache = {setting!r} cannot be used ({problem}); {remedy}")
    _LOG.warning(
        "compiled programs are not kept (%s); %s",
        problem,
        _ELSEWHERE if remedy is not _REMEDY else remedy,
    )
    return None


def _not_trusted(status: os.stat_result) -> str | None:
    """Why others may have written a file or directory; None if they cannot have."""
    if status.st_uid != os.geteuid():
        return "belongs to another user"
    return "can be written by others" if status.st_mode & _OTHERS_WRITE else None


def say_unused(
    store: ProgramStore | None, settings: StoreSettings, directory: Path | None, cacheable: bool
) -> None:
    """Logs a warning where a store was asked for and is not the one in use.

    Args:
      settings: as configured.
      directory: in use.
      cacheable: whether this process's programs can be read again.
    """
    if store is not None and not cacheable:
        _LOG.warning(
            "compiled programs are not kept: those of some of a TPU's devices cannot be read "
            "again (jax issue 38004)"
        )
    elif store and settings != StoreSettings() and store.directory != directory:
        _LOG.warning(
            "compile_cache = %r is not used, but what JAX's own setting "
            "jax_compilation_cache_dir names: %s",
            settings.compile_cache,
            directory,
        )


class _InUse:
    """What this process uses: a store, or none, and whether JAX's own cache was switched off."""

    store: ProgramStore | None = None
    switched_off = False


def use_store(store: ProgramStore | None) -> Path | None:
    """Makes this process store what it compiles from now on; with None, nowhere.

    A cache that the user's own settings of JAX name stays in use, and no other is.

    Returns: the directory in use.
    """
    if _InUse.switched_off:
        _switch_jax_cache(on=True)
    settings = jax.config.values
    configured = settings["jax_compilation_cache_dir"]
    if configured and settings["jax_enable_compilation_cache"]:
        _InUse.store = None
        return Path(configured)
    _InUse.store = store
    return None if store is None else store.directory


def use_no_cache() -> None:
    """Makes this process neither store nor read compiled programs in any cache, until
    `use_store`."""
    _InUse.store = None
    if jax.config.values["jax_enable_compilation_cache"]:
        _switch_jax_cache(on=False)


def _switch_jax_cache(*, on: bool) -> None:
    jax.config.update("jax_enable_compilation_cache", on)
    jax_cache.reset_cache()  # JAX has asked for this setting once
    _InUse.switched_off = not on


def store_in_use() -> ProgramStore | None:
    """The store in use; None if nothing is stored, or the cache is the user's."""
    return _InUse.store


def settings_in_use() -> StoreSettings:
    """Settings by which another process uses the same store."""
    return StoreSettings("off") if _InUse.store is None else _InUse.store.settings


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK)  # for a writer, if it is a pipe


def _age(path: Path) -> float:
    """Seconds since a file was last used, to a day."""
    return time.time() - path.stat().st_mtime
