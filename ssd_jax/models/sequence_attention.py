"""Causal attention between the tokens of one array, by blocks of queries.

A block reads no keys beyond its last query, which saves nearly half of the products. Its gradients
are written out, since JAX derives those of keys and values as products with a transposed first
operand, which XLA on CPU widens to float32.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32

from ssd_jax.kernels.precision import precision

_BLOCK = 128
"""Queries a block."""


def causal_attention(
    q: Float[Array, "B T heads head_dim"],
    k: Float[Array, "B T kv_heads head_dim"],
    v: Float[Array, "B T kv_heads head_dim"],
    visible: Bool[Array, "B T T"],
) -> Float32[Array, "B T heads head_dim"]:
    """Grouped-query attention; products have the operands' common dtype, softmax and sums float32.

    `visible[b, i, j]` is whether token i sees token j. No token sees a later one, and each sees at
    least itself.
    """
    batch, length, heads, size = q.shape
    kv_heads = k.shape[2]
    grouped = q.reshape(batch, length, kv_heads, heads // kv_heads, size).transpose(0, 2, 3, 1, 4)
    keys, values = k.swapaxes(1, 2), v.swapaxes(1, 2)
    blocks = []
    for start in range(0, length, _BLOCK):
        end = min(start + _BLOCK, length)
        block_visible = visible[:, None, None, start:end, :end]
        q_block = grouped[:, :, :, start:end]
        blocks.append(_block(q_block, keys[:, :, :end], values[:, :, :end], block_visible))
    return jnp.concatenate(blocks, axis=3).transpose(0, 3, 1, 2, 4).reshape(q.shape)


@jax.custom_vjp
def _block(
    q: Float[Array, "B kv_heads group R head_dim"],
    k: Float[Array, "B kv_heads T head_dim"],
    v: Float[Array, "B kv_heads T head_dim"],
    visible: Bool[Array, "B 1 1 R T"],
) -> Float32[Array, "B kv_heads group R head_dim"]:
    return _block_forward(q, k, v, visible)[0]


def _block_forward(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array):
    scores = _product("bhqd,bhtd->bhqt", _flatten_group(q), k).reshape(*q.shape[:-1], -1)
    scores = jnp.where(visible, scores * q.shape[-1] ** -0.5, -jnp.inf)
    weights = _flatten_group(jax.nn.softmax(scores, axis=-1).astype(v.dtype))
    return _product("bhqt,bhtd->bhqd", weights, v).reshape(q.shape), (q, k, v, weights)


def _block_backward(residuals: tuple[jax.Array, ...], cotangent: jax.Array):
    q, k, v, weights = residuals
    grad_output = _flatten_group(cotangent).astype(v.dtype)
    grad_weights = _product("bhqd,bhtd->bhqt", grad_output, v)
    weights_f32 = weights.astype(jnp.float32)
    grad_scores = weights_f32 * (
        grad_weights - jnp.sum(weights_f32 * grad_weights, axis=-1, keepdims=True)
    )
    grad_scores = (grad_scores * q.shape[-1] ** -0.5).astype(q.dtype)
    grad_q = _product("bhqt,bhtd->bhqd", grad_scores, k).reshape(q.shape)
    grad_k = _product("bhqd,bhqt->bhdt", _flatten_group(q), grad_scores)
    grad_v = _product("bhqd,bhqt->bhdt", grad_output, weights)
    return (
        grad_q.astype(q.dtype),
        grad_k.astype(k.dtype).swapaxes(2, 3),
        grad_v.astype(v.dtype).swapaxes(2, 3),
        None,
    )


_block.defvjp(_block_forward, _block_backward)


def _product(spec: str, a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.einsum(spec, a, b, precision=precision(a, b), preferred_element_type=jnp.float32)


def _flatten_group(
    x: Float[Array, "B kv_heads group R head_dim"],
) -> Float[Array, "B kv_heads group*R head_dim"]:
    """Flattens the query heads of each key/value head, so that they share a product."""
    return x.reshape(*x.shape[:2], -1, x.shape[-1])
