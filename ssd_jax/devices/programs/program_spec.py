"""Specifications of programs, and their compilation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.programs import lookup
from ssd_jax.devices.programs.packing import PackedProgram, Packing
from ssd_jax.models.sharding import DATA_AXIS
from ssd_jax.system import stored_jit
from ssd_jax.system.cores import usable_cores
from ssd_jax.system.host_memory import give_back_freed_memory

Program = jax.stages.Compiled | PackedProgram

Name = tuple[str | int, ...]
"""A program's task, its sizes, and its variant where there is more than one."""


class ProgramSpec(NamedTuple):
    """A pure function to compile for arguments of known shapes.

    On a mesh, each group of devices that shares a model runs the function for its own slots: the
    function sees only these.

    Attributes:
      donate: arguments that are reused in place.
      results: shardings of the results, each a tree or one for a whole tree; None without a mesh.
      gathered: indices of results that every device has whole in the end.
      host_args, host_or_device_args: indices of arguments that a call has on the host, and on the
        host or the device; see `Packing`.
      options: the compiler's, by name.
      cache_key: names, with the program's name, what the function computes; empty where that is
        unknown: the function is then compiled at every start.
      returns: names of the results; see `PagedPrograms.spec`.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    donate: tuple[int, ...] = ()
    results: tuple[Any, ...] | None = None
    gathered: Collection[int] = ()
    host_args: tuple[int, ...] = ()
    host_or_device_args: tuple[int, ...] = ()
    options: tuple[tuple[str, bool], ...] = ()
    cache_key: str = ""
    returns: tuple[str, ...] = ()

    def compile(self, mesh: Mesh | None, name: Name | None = None) -> Program:
        """Compiles the program for the default device or for the devices of a mesh.

        Arguments without a sharding are whole on every device of the mesh.

        Args:
          name: with `cache_key`, finds a program that an earlier start kept; None always compiles.
        """
        if self.host_args:
            packing = Packing(self.arguments, self.host_args, self.host_or_device_args)
            arguments = (*(self.arguments[index] for index in packing.device_args), packing.struct)
            function, host_args = packing.unpack_for(self.function), ()
            donate = tuple(map(packing.device_args.index, self.donate))
            spec = self._replace(
                function=function, arguments=arguments, donate=donate, host_args=host_args
            )
            return PackedProgram(spec._find_or_compile(mesh, name), packing)
        return self._find_or_compile(mesh, name)

    def _find_or_compile(self, mesh: Mesh | None, name: Name | None) -> jax.stages.Compiled:
        devices = jax.local_devices()[:1] if mesh is None else mesh.devices.flatten().tolist()
        compile_or_load = functools.partial(self._compile_or_load, mesh, devices)
        if name is None or not self.cache_key:
            return compile_or_load()[0]
        shapes = [(struct.shape, str(struct.dtype)) for struct in jax.tree.leaves(self.arguments)]
        signature = (
            shapes,
            self.donate,
            sorted(self.gathered),
            self.host_args,
            self.host_or_device_args,
            self.options,
        )
        cache_key = f"{name} of {self.cache_key} for {signature}"
        return lookup.find_or_compile(cache_key, devices, compile_or_load)

    def _compile_or_load(
        self, mesh: Mesh | None, devices: Sequence[Any]
    ) -> tuple[jax.stages.Compiled, str | None]:
        if mesh is None:
            traced = jax.jit(self.function, donate_argnums=self.donate).trace(*self.arguments)
            return stored_jit.compile_or_load(traced, devices, options=dict(self.options))
        everywhere = NamedSharding(mesh, PartitionSpec())

        def placed(struct: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            sharding = struct.sharding or everywhere
            return jax.ShapeDtypeStruct(struct.shape, struct.dtype, sharding=sharding)

        arguments = jax.tree.map(placed, self.arguments)
        per_group = jax.shard_map(
            self.function,
            mesh=mesh,
            in_specs=jax.tree.map(lambda struct: _of_slots(struct.sharding), arguments),
            out_specs=jax.tree.map(_of_slots, self.results),
            axis_names={DATA_AXIS},
            check_vma=False,
        )
        results = self.results
        if self.gathered and results is not None:
            pairs = enumerate(results)
            results = tuple(everywhere if i in self.gathered else sharding for i, sharding in pairs)
        jitted = jax.jit(per_group, donate_argnums=self.donate, out_shardings=results)
        shardings = [struct.sharding for struct in jax.tree.leaves(arguments)], results
        return stored_jit.compile_or_load(
            jitted.trace(*arguments), devices, shardings, dict(self.options)
        )


def _of_slots(sharding: NamedSharding) -> PartitionSpec:
    """The part of a sharding that is over slots."""
    return PartitionSpec(*(axis if axis == DATA_AXIS else None for axis in sharding.spec))


def working_memory(programs: Iterable[Program]) -> int:
    """Most bytes that one of the programs takes on a device while it runs, beside its arguments."""
    most = 0
    for program in programs:
        analysis = program.memory_analysis()
        if analysis is not None:
            results = analysis.output_size_in_bytes - analysis.alias_size_in_bytes
            most = max(most, analysis.temp_size_in_bytes + results)
    return most


def ints(*shape: int) -> jax.ShapeDtypeStruct:
    """Struct of an int32 array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


Compiler = Callable[[Mapping[Name, ProgramSpec], Mesh | None, Progress | None], Mapping[Name, Any]]
"""Compiles programs; see `compile_all`, the usual one."""


def compile_all(
    specs: Mapping[Name, ProgramSpec], mesh: Mesh | None, progress: Progress | None = None
) -> dict[Name, Program]:
    """Compiles programs, except those that an earlier start kept.

    Tracing holds the interpreter lock, compiling does not: as many threads as cores, at least two,
    overlap them.

    `progress` is called with (programs done, programs in all). An error cancels programs not begun;
    an interrupt does not wait for those under way either.
    """
    progress = progress or (lambda _done, _total: None)
    pool, waits = ThreadPoolExecutor(max(2, len(usable_cores()))), True
    try:
        futures = {name: pool.submit(spec.compile, mesh, name) for name, spec in specs.items()}
        progress(0, len(futures))
        for done, future in enumerate(as_completed(futures.values()), start=1):
            future.result()
            progress(done, len(futures))
        return {name: future.result() for name, future in futures.items()}
    except KeyboardInterrupt:
        waits = False  # some programs take minutes
        raise
    finally:  # after an error, without those not begun
        pool.shutdown(waits, cancel_futures=True)
        give_back_freed_memory()  # compilers take hundreds of megabytes
