"""Weights of few bits whose groups of inputs have scales, for products by XLA.

A value is number * scale + minimum, the last two those of its output and of its group of inputs,
computed in float32 and then rounded to bfloat16: what a weight has that is dequantised when it is
loaded. XLA for TPUs does this while it reads the numbers, and holds no values in memory, if groups
are an axis of their own and outputs the last one; from [outputs, inputs] it would make copies.

XLA for GPUs makes copies of values, and none of numbers. So there the sums of groups get the
scales, unless rows are so many that these sums would be more than the values.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float, Float32, Int32, Shaped

_ROWS = 4
"""Inputs of a group that rows need to be few: sums are read and written in float32, and values
written and read in bfloat16, so with 4 there are half as many bytes of sums."""


class GroupQuantized(NamedTuple):
    """A weight in groups, of a `GroupForm`; minima=None stands for zeros."""

    values: Shaped[Array, "groups group outputs"]
    scales: Float32[Array, "groups outputs"]
    minima: Float32[Array, "groups outputs"] | None = None


class ScaledSums(GroupQuantized):
    """A weight whose products scale the sums of groups where rows are few."""


class GroupStructs(NamedTuple):
    """Shape, dtype and sharding of each array of a `GroupQuantized`."""

    values: jax.ShapeDtypeStruct
    scales: jax.ShapeDtypeStruct
    minima: jax.ShapeDtypeStruct | None


def dequantize(weight: GroupQuantized) -> BFloat16[Array, "groups group outputs"]:
    """The values of a weight."""
    return _values(weight).astype(jnp.bfloat16)


def product(x: Float[Array, "n inputs"], weight: GroupQuantized) -> Float32[Array, "n outputs"]:
    """x @ weight^T, of values and activations in bfloat16, or numbers where sums are scaled."""
    groups, group, _ = weight.values.shape
    rows = x.astype(jnp.bfloat16).reshape(-1, groups, group)
    few = groups == 1 or _ROWS * len(rows) <= group
    if isinstance(weight, ScaledSums) and few:
        return _scaled_sums(rows, weight)
    return jax.lax.dot_general(
        rows,
        dequantize(weight),
        (((1, 2), (0, 1)), ((), ())),
        preferred_element_type=jnp.float32,
    )


def _scaled_sums(
    rows: BFloat16[Array, "n groups group"], weight: GroupQuantized
) -> Float32[Array, "n outputs"]:
    sums = jax.lax.dot_general(
        rows,
        weight.values.astype(jnp.bfloat16),
        (((2,), (1,)), ((1,), (0,))),
        preferred_element_type=jnp.float32,
    )
    total = jnp.sum(sums * weight.scales[:, None], axis=0)
    if weight.minima is None:
        return total
    moments = jnp.sum(rows, axis=2, dtype=jnp.float32)
    return total + jnp.dot(moments, weight.minima, precision="highest")


def take(weight: GroupQuantized, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Rows of a weight."""
    minima = None if weight.minima is None else weight.minima[:, indices]
    rows = GroupQuantized(weight.values[..., indices], weight.scales[:, indices], minima)
    return _values(rows).reshape(-1, indices.shape[0]).T


def _values(weight: GroupQuantized) -> Float32[Array, "groups group outputs"]:
    values = weight.values.astype(jnp.float32) * weight.scales[:, None]
    return values if weight.minima is None else values + weight.minima[:, None]
