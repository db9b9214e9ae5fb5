"""Jitted functions whose programs the store in use has, by what they compute.

A function is traced and lowered at every start; only compiling it is left out.
"""

from __future__ import annotations

import hashlib
import logging
import os
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib.version
import numpy as np
from jax.experimental import serialize_executable
from jax.extend.backend import get_compile_options
from jax.sharding import Mesh, NamedSharding

from ssd_jax.system.compile_cache import ProgramStore, store_in_use
from ssd_jax.system.environment import processor

_LOG = logging.getLogger(__name__)
_ADDRESS = re.compile("0x[0-9a-f]+")
_NO_NAME = re.compile("[^A-Za-z0-9]")
_NO_PROGRAM = (
    *("jax_compilation_cache_dir", "jax_persistent_cache_min", "jax_enable_compilation_cache"),
)
"""Prefixes of settings of JAX that change no program."""


def conditions(client: Any) -> tuple[Any, ...]:
    """All besides a program that decides what a client's compiler makes of it: versions, settings,
    flags and processor, but not the number of cores."""
    settings = (item for item in jax.config.values.items() if not item[0].startswith(_NO_PROGRAM))
    versions = jax.__version__, jaxlib.version.__version__
    return (client.platform, client.platform_version, *versions, processor(), *sorted(settings),
            *_flags())  # fmt: skip


def _flags() -> tuple[Any, ...]:
    """Flags of compilers; XLA's as it read them when it began, from the environment or a file."""
    return get_compile_options(1, 1).SerializeAsString(), os.environ.get("LIBTPU_INIT_ARGS")


def compile_or_load(
    traced: jax.stages.Traced,
    devices: Sequence[Any],
    shardings: Any = None,
    options: Mapping[str, Any] | None = None,
) -> tuple[jax.stages.Compiled, str | None]:
    """The compiled program of a traced function, from the store in use if it is there.

    Args:
      devices: of the program, in the order in which it numbers them.
      shardings: those that the function was given, of arguments and results.
      options: the compiler's.

    Returns: the program, and its key in the store; None if there is no store.
    """
    lowered, store = traced.lower(), store_in_use()
    if store is None:
        return lowered.compile(dict(options or {}) or None), None
    # The text lacks arguments that are not used, and which types are weak.
    facts = (
        conditions(devices[0].client),
        *(lowered.as_text(), _ADDRESS.sub("", str(traced.jaxpr)), str(traced.jaxpr.out_avals)),
        *(str(lowered.in_tree), str(lowered.out_tree), str(lowered.args_info)),
        *([(device.id, device.device_kind) for device in devices], str(shardings)),
        sorted((options or {}).items()),
        (jax.process_index(), jax.process_count()),
    )
    key = f"{_NO_NAME.sub('_', traced.fun_name)}-{digest(facts)}"
    program = load(store, key, devices)
    if program is None:
        program = lowered.compile(dict(options or {}) or None)
        _store(store, key, program)
    return program, key


def load(store: ProgramStore, key: str, devices: Sequence[Any]) -> jax.stages.Compiled | None:
    """A program from a store; None if it is not there, or cannot be loaded."""
    entry = store.get(key)
    if entry is None:
        return None
    try:
        serialized, arguments, results = pickle.loads(zlib.decompress(entry))
        return serialize_executable.deserialize_and_load(
            serialized, arguments, results, devices[0].client, devices
        )
    except Exception as error:  # whatever has changed in JAX, the program can be compiled
        _LOG.debug("a stored program cannot be loaded: %r", error)
        return None


def _store(store: ProgramStore, key: str, program: jax.stages.Compiled) -> None:
    try:
        entry = pickle.dumps(serialize_executable.serialize(program))
    except Exception as error:  # some programs cannot be serialised
        _LOG.debug("a program cannot be stored: %r", error)
        return
    store.put(key, zlib.compress(entry))


def digest(values: Any) -> str:
    """Hash of values whose `repr` says all of them."""
    return hashlib.sha256(repr(values).encode()).hexdigest()


class StoredJit:
    """`jax.jit`, with programs from the store in use. Each call has arrays as positional arguments.

    Where the devices are not clear from shardings, it is `jax.jit` alone.

    Args:
      static: names of keyword arguments that are static.
      out_shardings, donate: as `jax.jit` takes them.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        static: tuple[str, ...] = (),
        out_shardings: Any = None,
        donate: tuple[int, ...] = (),
    ) -> None:
        specified = {} if out_shardings is None else {"out_shardings": out_shardings}
        self._jitted = jax.jit(function, static_argnames=static, donate_argnums=donate, **specified)
        self._results = out_shardings
        self._programs: dict[Any, jax.stages.Compiled] = {}

    def __call__(self, *arguments: Any, **static: Any) -> Any:
        """Runs the function."""
        if store_in_use() is None:
            return self._jitted(*arguments, **static)
        leaves, tree = jax.tree.flatten(arguments)
        signature = tree, tuple(map(_signature, leaves)), tuple(sorted(static.items()))
        program = self._programs.get(signature)
        if program is None:
            arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
            shardings = [array.sharding for array in arrays]
            devices = _devices([*shardings, *jax.tree.leaves(self._results)])
            if devices is None:
                return self._jitted(*arguments, **static)
            traced = self._jitted.trace(*arguments, **static)
            committed = [array.committed for array in arrays]
            program, _ = compile_or_load(traced, devices, (shardings, committed, self._results))
            self._programs[signature] = program
        return program(*arguments)


def _signature(argument: Any) -> Any:
    if isinstance(argument, jax.Array):
        kind = argument.shape, argument.dtype, argument.weak_type
        return *kind, argument.sharding, argument.committed
    if isinstance(argument, np.ndarray | np.generic):
        return argument.shape, argument.dtype
    return type(argument)


def _devices(shardings: Sequence[Any]) -> list[Any] | None:
    """The devices of a program for arrays with these shardings; None if that is not clear."""
    named = [s.mesh for s in shardings if isinstance(s, NamedSharding)]
    meshes = {tuple(mesh.devices.flat) for mesh in named if isinstance(mesh, Mesh)}
    single = {device for s in shardings if len(s.device_set) == 1 for device in s.device_set}
    if len(meshes) == 1:
        return list(*meshes)
    if meshes or len(single) > 1 or any(len(s.device_set) > 1 for s in shardings):
        return None
    return list(single) or jax.local_devices()[:1]
