"""Proposed tokens with the exact distributions they were drawn from, kept sparse."""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

Array = jax.Array | np.ndarray
"""The arrays of a proposal that comes from the host may still be on the host."""

_LINE = 512


class Proposal(NamedTuple):
    """K proposed tokens for each of B rows.

    The token at position i was drawn from q_i, which is zero outside `support[:, i]`. The stored
    numbers are exactly those of the draw. A proposal without a distribution (n-gram, late or
    malformed q) is a point mass: one entry with probability 1.

    Attributes:
      length: L in 0..K: positions from L on are not proposed. It may depend on time and on kept
        tokens, never on a token drafted and then dropped.
      support: ids, padded with -1.
      q: probabilities of the support, 0 at padding.
    """

    tokens: Int32[Array, "B K"]
    length: Int32[Array, "B"]
    support: Int32[Array, "B K N"]
    q: Float32[Array, "B K N"]


def blank(rows: int, count: int, support: int) -> Proposal:
    """Room for `count` proposed tokens a row, none of them used: L = 0."""
    return Proposal(
        jnp.zeros((rows, count), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, count, support), jnp.int32),
        jnp.zeros((rows, count, support), jnp.float32),
    )


def narrow(proposal: Proposal, count: int) -> Proposal:
    """The first `count` tokens of every row; L must be at most `count`."""
    tokens, length, support, q = proposal
    return Proposal(tokens[:, :count], length, support[:, :count], q[:, :count])


def as_point_mass_where(proposal: Proposal, rows: Bool[Array, "B"]) -> Proposal:
    """The same tokens, with some rows treated as point masses.

    This is for q that is late, missing or malformed, and exact for any tokens drawn independently
    of the target's noise. `rows` may depend on arrival and validity only.
    """
    first = jnp.arange(proposal.q.shape[2]) == 0
    mass = jnp.where(first, 1.0, 0.0)
    ids = jnp.where(first, proposal.tokens[:, :, None], -1)
    selected = rows[:, None, None]
    return proposal._replace(
        support=jnp.where(selected, ids, proposal.support), q=jnp.where(selected, mass, proposal.q)
    )


def q_of_tokens(proposal: Proposal) -> Float32[jax.Array, "B K"]:
    """q of each proposed token."""
    match = proposal.support == proposal.tokens[:, :, None]
    return jnp.sum(jnp.where(match, proposal.q, 0.0), axis=-1)


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
