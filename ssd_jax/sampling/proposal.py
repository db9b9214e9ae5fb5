"""Proposed tokens with the exact distributions they were drawn from, kept sparse."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Array = jax.Array | np.ndarray
"""Where a proposal comes from the host, its arrays may still be there."""


class Proposal(NamedTuple):
    """K proposed tokens for each of B rows.

    Position i was drawn from q_i, which is zero outside `support[:, i]`. What is stored is what was
    drawn from, number for number. A proposal without a distribution (n-gram, late or malformed q)
    is a point mass: one entry with probability 1.

    Attributes:
      tokens: [B, K] int32.
      length: [B] int32, L in 0..K: positions from here on are not proposed. It may depend on time
        and on tokens kept, never on a token drafted and then dropped.
      support: [B, K, N] int32 ids, padded with -1.
      q: [B, K, N] float32 probabilities of the support, 0 at padding.
    """

    tokens: Array
    length: Array
    support: Array
    q: Array


def blank(rows: int, count: int, support: int) -> Proposal:
    """Room for `count` proposed tokens a row, none of them used: L = 0."""
    return Proposal(
        jnp.zeros((rows, count), jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.zeros((rows, count, support), jnp.int32),
        jnp.zeros((rows, count, support), jnp.float32),
    )


def none(rows: int) -> Proposal:
    """Nothing proposed: verification is then plain sampling (K = 0)."""
    return blank(rows, 0, 1)


def narrow(proposal: Proposal, count: int) -> Proposal:
    """The first `count` tokens of every row; L must not be more."""
    tokens, length, support, q = proposal
    return Proposal(tokens[:, :count], length, support[:, :count], q[:, :count])


def point_mass(tokens: jax.Array, length: jax.Array) -> Proposal:
    """A proposal of given tokens [B, K], each with probability 1."""
    return Proposal(tokens, length, tokens[:, :, None], jnp.ones((*tokens.shape, 1), jnp.float32))


def as_point_mass_where(proposal: Proposal, rows: jax.Array) -> Proposal:
    """The same tokens, with the rows [B] bool treated as point masses.

    For q that is late, missing or malformed: exact for any tokens drawn independently of the
    target's noise. `rows` may look at arrival and validity only.
    """
    first = jnp.arange(proposal.q.shape[2]) == 0
    mass = jnp.where(first, 1.0, 0.0)
    ids = jnp.where(first, proposal.tokens[:, :, None], -1)
    here = rows[:, None, None]
    return proposal._replace(
        support=jnp.where(here, ids, proposal.support), q=jnp.where(here, mass, proposal.q)
    )


def of_token(proposal: Proposal) -> jax.Array:
    """q of each proposed token, [B, K] float32."""
    match = proposal.support == proposal.tokens[:, :, None]
    return jnp.sum(jnp.where(match, proposal.q, 0.0), axis=-1)


def dense(support: jax.Array, q: jax.Array, vocab: int) -> jax.Array:
    """q over the whole vocabulary, [B, V], from one position's support and q [B, N]."""
    rows = jnp.arange(support.shape[0])[:, None]
    ids = jnp.where(support < 0, vocab, support)
    return jnp.zeros((support.shape[0], vocab), jnp.float32).at[rows, ids].add(q, mode="drop")
