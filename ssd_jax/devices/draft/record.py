"""Speculation records: what a draft keeps of a proposal, so that it can branch from it.

A record follows a pending token t* at position `start`: the proposed tokens with their q, and for
each of them the likeliest candidates c_i at its place. Keys and values of t*, s_1..s_{L-1} belong
to it, and are kept by the code that runs the model; it lacks the key and value of s_L, and c_L.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.drafting import Draw
from ssd_jax.sampling.proposal import Proposal, blank


class Record(NamedTuple):
    """Records of B rows.

    Attributes:
      start: position of the pending token t*; -1 is an idle row.
      pending: t*.
      proposal: K proposed tokens, L of them real.
      candidates: c_0..c_{K-1}, the likeliest tokens at the place of each proposed one, likeliest
        first, -1 where there are none.
      confidence: the draft's confidence in each proposed token; see `drafting.Draw`.
      hidden: the model's hidden states (H values) at these places, so that their logits can be
        computed again; empty where that is never needed.
    """

    start: Int32[Array, "B"]
    pending: Int32[Array, "B"]
    proposal: Proposal
    candidates: Int32[Array, "B K W"]
    confidence: Int32[Array, "B K"]
    hidden: Float32[Array, "B K kept"]


def empty(rows: int, k: int, support: int, candidates: int, hidden: int = 0) -> Record:
    """Records of idle rows."""
    return Record(
        jnp.full(rows, -1, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        blank(rows, k, support),
        jnp.full((rows, k, candidates), -1, jnp.int32),
        jnp.full((rows, k), UNKNOWN, jnp.int32),
        jnp.zeros((rows, k, hidden), jnp.float32),
    )


def put(
    record: Record,
    draw: Draw,
    hidden: Float32[Array, "B H"],
    place: Int32[Array, "B"],
    live: Bool[Array, "B"],
) -> Record:
    """Puts the draws of `live` rows into the records, as token `place` of their proposals.

    The draws come from `hidden`, which is kept where the record has room for it.
    """
    rows = jnp.arange(place.shape[0])
    place = jnp.where(live, place, record.candidates.shape[1])  # outside: dropped

    def put_in(array: jax.Array | np.ndarray, values: jax.Array) -> jax.Array:
        return jnp.asarray(array).at[rows, place].set(values, mode="drop")

    tokens, length, support, q = record.proposal
    proposal = Proposal(
        put_in(tokens, draw.token), length, put_in(support, draw.support), put_in(q, draw.q)
    )
    return record._replace(
        proposal=proposal,
        candidates=put_in(record.candidates, draw.candidates),
        confidence=put_in(record.confidence, draw.confidence),
        hidden=put_in(record.hidden, hidden[:, : record.hidden.shape[2]]),
    )


def where(rows: Bool[Array, "B"], inside: Record, outside: Record) -> Record:
    """`inside` records in these rows, `outside` in the others."""

    def choose(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.where(rows.reshape(-1, *(1,) * (x.ndim - 1)), x, y)

    return jax.tree.map(choose, inside, outside)
