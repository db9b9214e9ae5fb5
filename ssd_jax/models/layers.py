"""Building blocks shared by every decoder family. Attribute names are the checkpoint's."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

Axes = tuple[str | None, ...]


def parameter(shape: tuple[int, ...], axes: Axes, dtype: jnp.dtype) -> nnx.Param:
    """A parameter with its logical axis names (see `sharding.py`); built under `eval_shape`."""
    return nnx.Param(jnp.zeros(shape, dtype), axes=axes)


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x [n, in] @ weight [out, in]^T in the weight's dtype, accumulated to [n, out] float32."""
    contract_in = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(
        x.astype(weight.dtype), weight, contract_in, preferred_element_type=jnp.float32
    )


class Linear(nnx.Module):
    """y = x W^T + b with W [out, in] and float32 accumulation."""

    def __init__(self, shape: tuple[int, int], axes: Axes, dtype: jnp.dtype, *, bias: bool = False):
        self.weight = parameter(shape, axes, dtype)
        self.bias = parameter(shape[:1], axes[:1], jnp.dtype(jnp.float32)) if bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [rows, in], any float dtype -> [rows, out] float32."""
        y = product(x, self.weight[...])
        return y if self.bias is None else y + self.bias[...]


class Embedding(nnx.Module):
    """Token embeddings [vocab, hidden]; also the output head when tied."""

    def __init__(self, shape: tuple[int, int], dtype: jnp.dtype):
        self.weight = parameter(shape, ("vocab", "embed"), dtype)

    def __call__(self, tokens: jax.Array) -> jax.Array:
        """tokens [rows] int32 -> [rows, hidden] float32."""
        return self.weight[...][tokens].astype(jnp.float32)


class RMSNorm(nnx.Module):
    """Root-mean-square norm over the last axis, float32."""

    def __init__(self, size: int, axis: str | None, eps: float):
        self.weight = parameter((size,), (axis,), jnp.dtype(jnp.float32))
        self.eps = eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """x [..., size] float32 -> the same shape."""
        scale = jax.lax.rsqrt(jnp.mean(jnp.square(x), axis=-1, keepdims=True) + self.eps)
        return x * scale * self.weight[...]


def pad_rows(x: jax.Array, rows: int) -> jax.Array:
    """x [n, ...] with zeros appended up to `rows`."""
    return jnp.pad(x, ((0, max(rows - x.shape[0], 0)), *((0, 0),) * (x.ndim - 1)))
