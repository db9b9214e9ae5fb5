"""Sparse rows of numbers, made dense."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float32, Int32

Array = jax.Array | np.ndarray

_LINE = 512


def dense(
    support: Int32[Array, "B N"], q: Float32[Array, "B N"], vocab: int
) -> Float32[jax.Array, "B {vocab}"]:
    """q over the whole vocabulary, from one position's support and finite q."""
    scatter = functools.partial(dense_by_scatter, vocab=vocab)
    if support.shape[1] * (_lines(vocab) + _LINE) > vocab:  # factors larger than the product
        return scatter(support, q)
    product = functools.partial(dense_by_product, vocab=vocab)
    return jax.lax.platform_dependent(support, q, tpu=product, default=scatter)


def dense_by_scatter(
    support: Int32[Array, "B N"], q: Float32[Array, "B N"], *, vocab: int
) -> Float32[jax.Array, "B {vocab}"]:
    """`dense` by a scatter."""
    rows = jnp.arange(support.shape[0])[:, None]
    ids = jnp.where(support < 0, vocab, support)
    # XLA would merge positive zeros with any other zeros of this shape, and read those from memory.
    zeros = jnp.full((support.shape[0], vocab), -0.0, jnp.float32)
    return zeros.at[rows, ids].add(q, mode="drop")


def dense_by_product(
    support: Int32[Array, "B N"], q: Float32[Array, "B N"], *, vocab: int
) -> Float32[jax.Array, "B {vocab}"]:
    """`dense` by a product of lines [H, N] of `_LINE` ids and places in a line [N, _LINE].

    For TPUs, of which v6e scatters through memory. Every element of the product is q of one id plus
    zeros, so nothing is rounded.
    """
    line, offset = support // _LINE, support % _LINE  # padding has line -1
    lines = line[:, :, None] == jnp.arange(_lines(vocab))
    offsets = offset[:, :, None] == jnp.arange(_LINE)
    q_lines = jnp.einsum(
        "bnh,bnl->bhl",
        jnp.where(lines, q[:, :, None], 0.0),
        offsets.astype(jnp.float32),
        precision="highest",
    )
    return q_lines.reshape(support.shape[0], -1)[:, :vocab]


def _lines(vocab: int) -> int:
    return -(-vocab // _LINE)
