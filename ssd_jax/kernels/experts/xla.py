"""Products with experts' weights by XLA, on every platform: the baseline for others.

On processors `jax.lax.ragged_dot` multiplies every row with every expert. Here a loop takes a few
rows of one expert at a time, and so reads the weights of experts that have rows, and no others. On
processors it takes as many turns as there are such blocks. Elsewhere a device would wait for the
host at a loop of unknown length, so it takes as many as there may be, and repeats the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.experts import groups
from ssd_jax.kernels.experts.groups import ExpertGroups
from ssd_jax.kernels.linear import xla
from ssd_jax.kernels.linear.quantized import Quantized

_ROWS_ON_CPU = 8  # of a block, whatever the number of rows: XLA chooses how to multiply by it
_LEAST_ROWS, _MOST_ROWS = 8, 128


def products(
    x: Float[Array, "m inputs"],
    group_sizes: Int32[Array, "E"],
    weights: Sequence[Float[Array, "E _ inputs"] | Quantized | ExpertGroups],
) -> list[Float32[Array, "m _"]]:
    """See `api.expert_products`."""
    count, experts = x.shape[0], group_sizes.shape[0]
    average = max(1, -(-count // experts))
    rows = min(max(1 << (average - 1).bit_length(), _LEAST_ROWS), _MOST_ROWS)
    return jax.lax.platform_dependent(
        x,
        group_sizes,
        list(weights),
        cpu=functools.partial(_in_blocks, rows=_ROWS_ON_CPU),
        default=functools.partial(_in_blocks, rows=rows, turns=count // rows + min(experts, count)),
    )


def _in_blocks(
    x: jax.Array,
    group_sizes: jax.Array,
    weights: list[Any],
    *,
    rows: int,
    turns: int | None = None,
) -> list[Any]:
    """At most `rows` rows of one expert at a time, in so many turns; None is as many as it takes.

    A block that is not full also has rows of later experts, whose own blocks overwrite what it
    gives for them.
    """
    count = x.shape[0]
    ends = jnp.cumsum(group_sizes)
    blocks = -(-group_sizes // rows)
    block_ends = jnp.cumsum(blocks)
    x = jnp.pad(x, ((0, rows), (0, 0)))

    def multiply(block: jax.Array, ys: list[jax.Array]) -> list[jax.Array]:
        if turns is not None:
            block = jnp.minimum(block, block_ends[-1] - 1)
        expert = jnp.sum(block_ends <= block)
        turn = block - (block_ends - blocks)[expert]
        begin = (ends - group_sizes)[expert] + turn * rows
        part = jax.lax.dynamic_slice_in_dim(x, begin, rows)
        experts = weights
        if turns is None:  # else XLA on CPU makes float32 of all experts before the loop
            experts, expert = jax.lax.optimization_barrier((weights, expert))
        return [
            jax.lax.dynamic_update_slice_in_dim(y, _product(part, matrix), begin, 0)
            for y, matrix in zip(ys, _of_expert(experts, expert), strict=True)
        ]

    ys = [jnp.zeros((count + rows, _outputs(weight)), jnp.float32) for weight in weights]
    ys = jax.lax.fori_loop(0, block_ends[-1] if turns is None else turns, multiply, ys)
    there = jnp.arange(count)[:, None] < ends[-1]
    return [jnp.where(there, y[:count], 0) for y in ys]


def _outputs(weight: Any) -> int:
    if isinstance(weight, ExpertGroups):
        return weight.outputs
    return jax.tree.leaves(weight)[0].shape[1]


def _product(x: jax.Array, matrix: Any) -> jax.Array:
    of_groups = isinstance(matrix, ExpertGroups)
    return groups.product(x, matrix) if of_groups else xla.product(x, matrix)


def _of_expert(weights: list[Any], expert: jax.Array) -> list[Any]:
    return jax.tree.map(
        lambda array: jax.lax.dynamic_index_in_dim(array, expert, keepdims=False), weights
    )
