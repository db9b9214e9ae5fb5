"""Finds compiled programs by what they are made from.

So a start need not trace and lower them, which takes longer than reading them. For each program in
the store, named after what it computes (`stored_jit`), an entry tells its key there. That entry is
named after all that a program can depend on: what it is made from, the sources of this package,
versions, devices and settings.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import flax
import jax

from ssd_jax.kernels import handlers
from ssd_jax.system import stored_jit
from ssd_jax.system.compile_cache import store_in_use

_LOG = logging.getLogger(__name__)
_PACKAGE = Path(__file__).parents[2]
_SOURCES = (".py", ".cc", ".h")
_IMPORTED = time.time()
_IMPORTING = 10.0  # most seconds since the first source was read


def find_or_compile(
    cache_key: str,
    devices: Sequence[Any],
    compile_or_load: Callable[[], tuple[jax.stages.Compiled, str | None]],
) -> jax.stages.Compiled:
    """Returns a program that the store in use has, or compiles it and stores how to find it.

    Args:
      cache_key: names, with sources, versions and settings, what is compiled.
      devices: of the program.
      compile_or_load: traces the program; see `stored_jit.compile_or_load`.
    """
    store = store_in_use()
    if store is None or _sources_digest() is None:
        return compile_or_load()[0]
    kinds = ((device.id, device.device_kind) for device in devices)
    process = jax.process_index(), jax.process_count()
    conditions = surroundings(devices[0].client), cache_key, *kinds, process
    name = f"lookup-{stored_jit.digest(conditions)}"
    key = store.get(name)
    if key is not None:
        program = stored_jit.load(store, key.decode(), devices)
        if program is not None:
            return program
    program, stored_key = compile_or_load()
    if stored_key is not None and _unchanged(_sources()):
        store.put(name, stored_key.encode())
    return program


def surroundings(client: Any) -> str:
    """Digest of all that decides the programs of a client, and so their cost.

    It covers sources, where they are known, versions, processor, settings and flags, but not the
    number of cores.
    """
    has_handlers = client.platform == "cpu" and handlers.why_missing() is None
    conditions = _sources_digest(), flax.__version__, stored_jit.conditions(client), has_handlers
    return stored_jit.digest(conditions)


@functools.cache
def _sources_digest() -> str | None:
    """Digest of the package's sources; None if it is not known which have been imported."""
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
    return digest.hexdigest()


def _sources() -> list[Path]:
    """Sources of this package, without files that editors leave there."""
    paths = (path for path in _PACKAGE.rglob("*") if path.suffix in _SOURCES and path.is_file())
    return sorted(path for path in paths if not path.name.startswith("."))


def _unchanged(sources: Sequence[Path]) -> bool:
    """Whether the sources on disk are those that were imported."""
    try:
        return all(path.stat().st_ctime < _IMPORTED - _IMPORTING for path in sources)
    except OSError:
        return False
