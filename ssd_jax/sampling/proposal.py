"""Proposed tokens with the exact distributions they were drawn from, kept sparse."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Float32, Int32

Array = jax.Array | np.ndarray
"""The arrays of a proposal that comes from the host may still be on the host."""


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
