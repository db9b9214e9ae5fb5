"""Meshes, the logical axis names of arrays, and the one table that maps them to mesh axes."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.stored_jit import StoredJit

DATA_AXIS = "data"
"""Mesh axis over which the slots of a batch are spread."""

TENSOR_AXIS = "tensor"
"""Mesh axis of tensor parallelism."""

PAGES_AXES = ("slots", "kv_heads", None, None)
"""Logical axes of a page array [pages, kv_heads, page_size, width]."""


def mesh_of(devices: Sequence[Any], data: int = 1) -> Mesh:
    """A mesh [data, tensor]: `data` groups share the slots, neighbours in a group share a model."""
    return Mesh(np.array(devices).reshape(data, -1), (DATA_AXIS, TENSOR_AXIS))


def put(arrays: Any, sharding: Sharding | None) -> Any:
    """Puts a tree of arrays on devices; only dispatches.

    Where devices belong to several processes, all of them have the arrays and each puts its own
    parts: nothing is sent, and nothing compared.
    """
    if sharding is None or sharding.is_fully_addressable:
        return jax.device_put(arrays, sharding)

    def put_local_parts(array: Any) -> jax.Array:
        if isinstance(array, jax.Array) and not array.is_fully_addressable:
            return jax.device_put(array, sharding)
        host_array = np.asarray(array)
        return jax.make_array_from_callback(
            host_array.shape, sharding, lambda index: host_array[index]
        )

    return jax.tree.map(put_local_parts, arrays)


def fully_addressable(array: jax.Array) -> jax.Array:
    """The array where this process can read it: one with parts in other processes is replicated."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return array
    assert isinstance(array.sharding, NamedSharding)
    return _replicate(replicated(array.sharding.mesh))(array)


@functools.cache
def _replicate(sharding: NamedSharding) -> StoredJit:
    return StoredJit(lambda array: array, out_shardings=sharding)


def replicated(mesh: Any) -> NamedSharding:
    """Sharding of arrays that are replicated on every device of a mesh."""
    return NamedSharding(mesh, PartitionSpec())


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh belong to several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShardingRules:
    """Mesh axis of each logical axis; None replicates. The default is tensor parallelism.

    Attributes:
      kv_copies: number of devices that have the same key/value head, where there are fewer heads
        than devices.
    """

    slots: str | None = DATA_AXIS
    vocab: str | None = TENSOR_AXIS
    outputs: str | None = TENSOR_AXIS
    heads: str | None = TENSOR_AXIS
    kv_heads: str | None = TENSOR_AXIS
    ffn: str | None = TENSOR_AXIS
    expert_ffn: str | None = TENSOR_AXIS
    experts: str | None = None
    embed: str | None = None
    kv_copies: int = 1

    @classmethod
    def for_mesh(
        cls, config: ModelConfig, mesh: Mesh, *, expert_parallel: bool = False
    ) -> ShardingRules:
        """Tensor parallelism of what the mesh divides evenly; all else is replicated.

        Attention is cut between key/value heads, each with its query heads. Where there are fewer
        of them than devices, several devices have the same head, each with its part of the query
        heads; where that does not divide evenly, attention is not cut.

        Args:
          expert_parallel: whether a device has some of the experts, and not a part of each.

        Raises:
          InputError: nothing can be cut, so each device would only repeat the others' work; or
            experts that are to be cut cannot be.
        """
        count = mesh.shape[TENSOR_AXIS]

        def axis_if_even(size: int) -> str | None:
            return None if size % count else TENSOR_AXIS

        copies = 1 if count % config.num_kv_heads else count // config.num_kv_heads
        heads = axis_if_even(config.num_heads) and axis_if_even(config.num_kv_heads * copies)
        vocab, outputs = axis_if_even(config.vocab_size), axis_if_even(config.outputs)
        ffn = TENSOR_AXIS if all(map(axis_if_even, config.channels)) else None
        experts = config.mechanisms.experts
        expert_ffn = TENSOR_AXIS if experts is None else axis_if_even(experts.intermediate)
        by_expert = None
        if expert_parallel:
            if experts is None or count < 2 or not axis_if_even(experts.count):
                raise InputError(
                    f"expert_parallel = true is for models whose experts are a multiple of the "
                    f"devices that share a model; here {0 if experts is None else experts.count} "
                    f"experts and {count} devices: leave it out, or give another mesh"
                )
            expert_ffn, by_expert = None, TENSOR_AXIS
        has_channels = (config.channels and ffn) or (experts and (expert_ffn or by_expert))
        if not (heads or vocab or outputs or has_channels):
            channels = (*config.channels, *((experts.intermediate,) if experts else ()))
            raise InputError(
                f"{count} devices divide nothing of a model with {config.num_kv_heads} key/value "
                f"heads, {' and '.join(map(str, channels))} channels and "
                f"{config.vocab_size} words, so "
                "each would hold it whole; give another number of devices"
            )
        return cls(
            vocab=vocab,
            outputs=outputs,
            heads=heads,
            kv_heads=heads,
            ffn=ffn,
            expert_ffn=expert_ffn,
            experts=by_expert,
            kv_copies=copies if heads else 1,
        )

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """Logical axes that tensor parallelism would split but that are replicated."""
        defaults = dataclasses.asdict(ShardingRules())
        axes = [name for name, axis in defaults.items() if axis and not getattr(self, name)]
        return tuple(name for name in axes if name != "expert_ffn" or not self.experts)

    def spec(self, axes: tuple[str | None, ...]) -> PartitionSpec:
        """The partition of an array with these logical axes."""
        return PartitionSpec(*(None if axis is None else getattr(self, axis) for axis in axes))


@dataclasses.dataclass(frozen=True)
class MeshLayout:
    """Where arrays lie, by the logical names of their axes.

    Attributes:
      mesh: None is the default device.
    """

    mesh: Mesh | None
    rules: ShardingRules

    def sharding(self, axes: tuple[str | None, ...]) -> Sharding | None:
        """That of an array with these axes; None on the default device."""
        return None if self.mesh is None else NamedSharding(self.mesh, self.rules.spec(axes))

    def struct(
        self, shape: tuple[int, ...], dtype: Any, axes: tuple[str | None, ...]
    ) -> jax.ShapeDtypeStruct:
        """The struct of an array whose last axes are these; those before them are not sharded."""
        leading = (None,) * (len(shape) - len(axes))
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.sharding(leading + axes))

    def shares(self, axis: str | None) -> int:
        """Number of devices that have different parts of an axis, and share a model."""
        if self.mesh is None or axis is None or getattr(self.rules, axis) is None:
            return 1
        return self.mesh.shape[TENSOR_AXIS]
