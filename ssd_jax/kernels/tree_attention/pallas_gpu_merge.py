"""Merges the softmaxes of parts that the kernels of `pallas_gpu.py` return, in XLA."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float32

from ssd_jax.kernels.tree_attention.pallas_gpu_part import LOG2_E, LOWEST

MAX_MERGED, FOLDS = 16, 8
"""Most parts merged at once; number of parts that more are folded into."""


def merge(
    maximum: Float32[Array, "parts *rows 1"],
    total: Float32[Array, "parts *rows 1"],
    output: Float32[Array, "parts *rows head_dim"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Merges the softmaxes of parts, with maxima of powers of two, into one.

    A few are written out, so that XLA's kernels wait for reads only once. Many are merged in two
    steps, each of which has a thread for every number that it writes.
    """
    if len(maximum) > MAX_MERGED:
        groups = [x.reshape(FOLDS, -1, *x.shape[1:]) for x in (maximum, total, output)]
        return _merge_by_reduction(*_merge_by_reduction(*(x.swapaxes(0, 1) for x in groups)))
    merged_maximum = functools.reduce(jnp.maximum, maximum)
    weights = [jnp.exp2(part - merged_maximum) for part in maximum]

    def weighted_sum(values: jax.Array) -> jax.Array:
        terms = [weight * part for weight, part in zip(weights, values, strict=True)]
        return functools.reduce(jnp.add, terms)

    return merged_maximum, weighted_sum(total), weighted_sum(output)


def _merge_by_reduction(
    maximum: Float32[Array, "parts *rows _"],
    total: Float32[Array, "parts *rows _"],
    output: Float32[Array, "parts *rows head_dim"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """As `merge`, by one reduction, of which each result has the output's shape."""

    def add(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        merged_maximum = jnp.maximum(left[0], right[0])
        left_scale = jnp.exp2(left[0] - merged_maximum)
        right_scale = jnp.exp2(right[0] - merged_maximum)
        sums = (a * left_scale + b * right_scale for a, b in zip(left[1:], right[1:], strict=True))
        return merged_maximum, *sums

    state = tuple(jnp.broadcast_to(x, output.shape) for x in (maximum, total, output))
    identity = jnp.float32(LOWEST), jnp.float32(0), jnp.float32(0)
    return lax.reduce(state, identity, add, (0,))


def with_sinks(
    maximum: Float32[Array, "B kv_heads Q _"],
    total: Float32[Array, "B kv_heads Q _"],
    output: Float32[Array, "B kv_heads Q head_dim"],
    sinks: Float32[Array, "kv_heads Q"],
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The softmax with a further key of these scores, which has no value."""
    score = sinks[..., None] * LOG2_E
    new_maximum = jnp.maximum(maximum, score)
    rescale = jnp.exp2(maximum - new_maximum)
    total = total * rescale + jnp.exp2(score - new_maximum)
    return new_maximum, total, output * rescale
