"""Memory that arrays take on devices, and memory that devices have."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.kernels.experts.estimate import expected_experts
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import TreeShape


def device_limit(opened: OpenedModel) -> int | None:
    """Bytes that each of a model's devices may hold; None if the devices do not report it."""
    mesh = opened.model.mesh
    devices = jax.local_devices()[:1] if mesh is None else mesh.local_devices
    limits = [(device.memory_stats() or {}).get("bytes_limit") for device in devices]
    return min((limit for limit in limits if limit), default=None)


def devices_of_process(opened: OpenedModel) -> int:
    """Number of a model's devices that this process has."""
    mesh = opened.model.mesh
    return 1 if mesh is None else len(mesh.local_devices)


def bytes_per_device(structs: Any) -> int:
    """Bytes that arrays of these structs take on each device."""
    return sum(_shard_bytes(struct) for struct in jax.tree.leaves(structs))


def bytes_read(model: FunctionalModel, rows: int) -> int:
    """Bytes of weights that a device reads in a forward of so many tokens: of experts as many as
    they are expected to use there, see `expected_experts`."""
    total, experts = bytes_per_device(model.read_structs()), model.config.mechanisms.experts
    if experts is None:
        return total
    shards = model.execution.expert_shards
    devices = shards.devices if shards is not None and shards.by_expert else 1
    used = expected_experts(experts.count, rows, experts.chosen, devices)
    unread = 1 - used * devices / experts.count
    return total - round(unread * bytes_per_device(model.expert_structs()))


def bytes_of_process(structs: Any) -> int:
    """Bytes that these arrays take on all devices of this process."""
    return sum(_shard_bytes(struct) * _devices(struct) for struct in jax.tree.leaves(structs))


def branch_structs(
    opened: OpenedModel,
    *,
    slots: int,
    k: int,
    budgets: Sequence[int],
    support: int,
    tree: TreeShape | None = None,
) -> Any:
    """Structs of the branches of all `budgets`: keys and values, q of `support` ids, and logits.

    With trees, the record is one more branch, and its rows have logits, too.
    """
    if tree is not None:
        rows = slots * max(max(budgets) * tree.width, tree.nodes + 1)
        return [
            opened.model.branch_struct(slots, tree.entries, max(budgets) + 1),
            jax.ShapeDtypeStruct((rows, opened.model.config.outputs), np.float32),
            jax.eval_shape(lambda: tree_growth.empty(slots * max(budgets), tree, support)),
        ]
    branches, outputs = sum(budgets), opened.model.config.outputs
    rows = slots * branches
    return [
        opened.model.branch_struct(slots, k, branches),
        jax.ShapeDtypeStruct((rows, k, 2 * support), np.float32),
        jax.ShapeDtypeStruct((rows, outputs), np.float32),
    ]


def tree_structs(opened: OpenedModel, *, slots: int, shape: TreeShape, support: int) -> Any:
    """Structs of a draft's trees: keys and values of the nodes that it runs, and its candidates."""
    return [
        opened.model.branch_struct(slots, max(shape.runs, 1), 1),
        jax.eval_shape(lambda: tree_growth.empty(slots, shape, support)),
    ]


def _shard_bytes(struct: jax.ShapeDtypeStruct) -> int:
    unsharded = struct.sharding is None
    shape = struct.shape if unsharded else struct.sharding.shard_shape(struct.shape)
    if struct.dtype == jnp.int4:  # two of which NumPy keeps in two bytes, and devices in one
        return math.prod(shape) // 2
    return math.prod(shape) * struct.dtype.itemsize


def _devices(struct: jax.ShapeDtypeStruct) -> int:
    return 1 if struct.sharding is None else len(struct.sharding.addressable_devices)
