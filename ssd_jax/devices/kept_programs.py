"""Keeps compiled programs by what they are made from.

So a start need not trace and lower them, which takes longer than reading them. JAX finds an
executable by its lowered program. For each executable in our store (`compile_cache`) this module
keeps an entry: its arguments and results, and JAX's key. The entry is named after all that a
program can depend on: what it is made from, the sources of this package, versions, devices and
settings.
"""

from __future__ import annotations

import functools
import hashlib
import io
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jaxlib.version
from jax._src import compilation_cache
from jax._src.lib import xla_client  # pyright: ignore[reportPrivateImportUsage]
from jax.experimental import serialize_executable

from ssd_jax.kernels import handlers
from ssd_jax.system.compile_cache import ProgramStore, store_in_use

_LOG = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parent.parent
_SOURCES = (".py", ".cc", ".h")
_IMPORTED = time.time()
_IMPORTING = 10.0  # most seconds since the first source was read
_NO_PROGRAM = ("jax_compilation_cache_dir", "jax_persistent_cache_min")
"""Prefixes of settings that change no program."""


def compiled(
    made_from: str, devices: Sequence[Any], build: Callable[[], jax.stages.Compiled]
) -> jax.stages.Compiled:
    """Returns a program from the store in use, or builds it and keeps it there.

    Args:
      made_from: decides, with sources, versions and settings, what `build` builds.
      devices: of the program.
      build: traces, lowers and compiles the program.
    """
    store = store_in_use()
    if store is None or _fixed() is None or jax.process_count() > 1:
        return build()
    kinds = ((each.id, each.device_kind) for each in devices)
    about = surroundings(devices[0].client), made_from, *kinds
    key = f"{hashlib.sha256(repr(about).encode()).hexdigest()}-made"
    found = store.get(key)
    if found is not None:
        try:
            return _load(found, store, devices)
        except Exception as error:  # whatever has changed in JAX, the program can be built
            _LOG.debug("a kept program cannot be loaded: %r", error)
    with store.watch() as asked:
        program = build()
    if asked and _unchanged(_sources()):
        try:
            store.put(key, _dump(program, asked[-1]))
        except Exception as error:
            _LOG.debug("a program cannot be kept: %r", error)
    return program


def surroundings(client: Any) -> str:
    """Digest of all that decides the programs of a client, and so their cost.

    It covers sources, where they are known, versions, processor, settings and flags, but not the
    number of cores.
    """
    settings = (each for each in jax.config.values.items() if not each[0].startswith(_NO_PROGRAM))
    handled = client.platform == "cpu" and handlers.why_missing() is None
    about = client.platform, client.platform_version, *sorted(settings), *_flags(), handled
    return hashlib.sha256(repr((_fixed(), about)).encode()).hexdigest()


def _flags() -> tuple[Any, ...]:
    """Flags of compilers; XLA's as it read them when it began, from the environment or a file."""
    options: bytes = xla_client.CompileOptions().SerializeAsString()
    return options, os.environ.get("LIBTPU_INIT_ARGS")


@functools.cache
def _fixed() -> tuple[str, ...] | None:
    """Parts of the name that do not change within a process; None if its sources are unknown."""
    digest, sources = hashlib.sha256(), _sources()
    try:
        for path in sources:
            digest.update(f"{path.relative_to(_PACKAGE)}\0{path.stat().st_size}\0".encode())
            digest.update(path.read_bytes())
    except OSError as error:
        _LOG.debug("the sources cannot be read: %r", error)
        return None
    if not any(path.suffix == ".py" for path in sources) or not _unchanged(sources):
        return None
    versions = jax.__version__, jaxlib.version.__version__, flax.__version__
    return digest.hexdigest(), *versions, handlers.processor()


def _sources() -> list[Path]:
    """Sources of this package, without files that editors leave there."""
    found = (path for path in _PACKAGE.rglob("*") if path.suffix in _SOURCES and path.is_file())
    return sorted(path for path in found if not path.name.startswith("."))


def _unchanged(sources: Sequence[Path]) -> bool:
    """Whether the sources on disk are those that were imported."""
    try:
        return all(path.stat().st_ctime < _IMPORTED - _IMPORTING for path in sources)
    except OSError:
        return False


class _Pickler(serialize_executable._JaxPjrtPickler):
    """Pickles a program without its executable, which JAX keeps."""

    def __init__(self, file: io.BytesIO, key: str) -> None:
        super().__init__(file)
        self._key = key

    def persistent_id(self, obj: Any) -> Any:
        if isinstance(obj, xla_client.LoadedExecutable):
            return "kept", self._key
        return super().persistent_id(obj)


class _Unpickler(serialize_executable._JaxPjrtUnpickler):
    """Unpickles a program with its executable from the store."""

    def __init__(self, file: io.BytesIO, store: ProgramStore, devices: Sequence[Any]):
        super().__init__(file, devices[0].client, devices)
        self._store = store

    def persistent_load(self, pid: Any) -> Any:
        if pid[0] != "kept":
            return super().persistent_load(pid)
        kept = self._store.get(pid[1])
        if kept is None:
            raise KeyError(pid[1])
        unpacked = compilation_cache.decompress_executable(kept)
        executable, _ = compilation_cache.extract_executable_and_time(unpacked)
        return super().persistent_load(("exec", executable))


def _dump(program: jax.stages.Compiled, key: str) -> bytes:
    if program._params.const_args:
        raise ValueError("it has constants beside it")
    with io.BytesIO() as file:
        executable: Any = program._executable
        parts = executable._unloaded_executable, program.args_info, program.out_tree
        _Pickler(file, key).dump((*parts, program._no_kwargs))
        return compilation_cache.compress_executable(file.getvalue())


def _load(kept: bytes, store: ProgramStore, devices: Sequence[Any]) -> jax.stages.Compiled:
    file = io.BytesIO(compilation_cache.decompress_executable(kept))
    unloaded, args_info, out_tree, no_kwargs = _Unpickler(file, store, devices).load()
    return jax.stages.Compiled(unloaded.load(), [], args_info, out_tree, no_kwargs=no_kwargs)
