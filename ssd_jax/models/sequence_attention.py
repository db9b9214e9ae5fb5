"""Causal attention between the tokens of one array, by blocks of queries.

A block reads no keys beyond its last query, which saves nearly half of the products. Its gradients
are written out, since JAX derives those of keys and values as products with a transposed first
operand, which XLA on CPU widens to float32.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ssd_jax.kernels.precision import precision
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

_BLOCK = 128
"""Queries a block."""


def causal_attention(
    q: Float[Array, "B T heads head_dim"],
    k: Float[Array, "B T kv_heads head_dim"],
    v: Float[Array, "B T kv_heads head_dim"],
    visible: Bool[Array, "B T T"],
    positions: Int32[Array, "B T"] | None = None,
    variant: AttentionVariant = PLAIN,
) -> Float32[Array, "B T heads head_dim"]:
    """Grouped-query attention; products have the operands' common dtype, softmax and sums float32.

    Args:
      visible: at [b, i, j] whether token i sees token j, where a window does not hide it. No token
        sees a later one, and each sees at least itself.
      positions: of tokens in their texts; needed for a window.
      variant: gradients are those of its sinks, too.
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    if variant.window is not None:
        assert positions is not None
        visible &= positions[:, :, None] - positions[:, None] < variant.window
    scoring = _Scoring(variant.scale_for(size), variant.soft_cap)
    sinks = None if variant.sinks is None else variant.sinks.reshape(kv_heads, -1)
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    blocks = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        block_visible = visible[:, None, None, start:end, :end]
        q_block = grouped[:, :, :, start:end]
        operands = q_block, keys[:, :, :end], values[:, :, :end], block_visible, sinks
        blocks.append(_block(*operands, scoring))
    return jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)


class _Scoring(NamedTuple):
    """How products become scores; see `AttentionVariant`."""

    scale: float
    soft_cap: float | None


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _block(
    q: Float[Array, "B kv_heads group R head_dim"],
    k: Float[Array, "B kv_heads T head_dim"],
    v: Float[Array, "B kv_heads T head_dim"],
    visible: Bool[Array, "B 1 1 R T"],
    sinks: Float[Array, "kv_heads group"] | None,
    scoring: _Scoring,
) -> Float32[Array, "B kv_heads group R head_dim"]:
    return _block_forward(q, k, v, visible, sinks, scoring)[0]


class _Residuals(NamedTuple):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    weights: jax.Array
    slope: jax.Array | None  # of scores under the soft cap
    sinks: tuple[jax.Array, jax.Array] | None  # and their weights


def _block_forward(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    visible: jax.Array,
    sinks: jax.Array | None,
    scoring: _Scoring,
) -> tuple[jax.Array, _Residuals]:
    scores = _product("bhqd,bhtd->bhqt", _flatten_group(q), k).reshape(*q.shape[:-1], -1)
    scores, slope = scores * scoring.scale, None
    if scoring.soft_cap is not None:
        capped = jnp.tanh(scores / scoring.soft_cap)
        scores, slope = scoring.soft_cap * capped, _flatten_group(1 - capped**2)
    scores, with_weights = jnp.where(visible, scores, -jnp.inf), None
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        column = jnp.broadcast_to(sinks[:, :, None, None], (*scores.shape[:-1], 1))
        weights = jax.nn.softmax(jnp.append(scores, column, axis=-1), axis=-1)
        weights, with_weights = weights[..., :-1], (sinks, weights[..., -1])
    weights = _flatten_group(weights.astype(v.dtype))
    output = _product("bhqt,bhtd->bhqd", weights, v).reshape(q.shape)
    return output, _Residuals(q, k, v, weights, slope, with_weights)


def _block_backward(scoring: _Scoring, residuals: _Residuals, cotangent: jax.Array):
    q, k, v, weights, slope, sinks = residuals
    grad_output = _flatten_group(cotangent).astype(v.dtype)
    grad_weights = _product("bhqd,bhtd->bhqt", grad_output, v)
    weights_f32 = weights.astype(jnp.float32)
    mean = jnp.sum(weights_f32 * grad_weights, axis=-1, keepdims=True)
    grad_scores = weights_f32 * (grad_weights - mean)
    if slope is not None:
        grad_scores *= slope
    grad_scores = (grad_scores * scoring.scale).astype(q.dtype)
    grad_sinks = None
    if sinks is not None:  # they have no value
        of_queries = sinks[1] * mean.reshape(q.shape[:-1])
        grad_sinks = -jnp.sum(of_queries, axis=(0, 3)).astype(sinks[0].dtype)
    grad_q = _product("bhqt,bhtd->bhqd", grad_scores, k).reshape(q.shape)
    grad_k = _product("bhqd,bhqt->bhdt", _flatten_group(q), grad_scores)
    grad_v = _product("bhqd,bhqt->bhdt", grad_output, weights)
    return (
        grad_q.astype(q.dtype),
        grad_k.astype(k.dtype).swapaxes(2, 3),
        grad_v.astype(v.dtype).swapaxes(2, 3),
        None,
        grad_sinks,
    )


_block.defvjp(_block_forward, _block_backward)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=precision(a, b), preferred_element_type=jnp.float32)


def _flatten_group(
    x: Float[Array, "B kv_heads group R head_dim"],
) -> Float[Array, "B kv_heads group*R head_dim"]:
    """Flattens the query heads of each key/value head, so that they share a product."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
