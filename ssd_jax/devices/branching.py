"""Branches of a record: one for each verification outcome (k, t*) that is prepared for.

Fan-out says how many bonus tokens F_k are prepared for each number k of accepted tokens. For k < L
they are the best candidates of c_k other than s_{k+1}, which cannot be the bonus token there; for
k = L the best of c_L, which the draft knows only after running s_L. Branches are numbered by
k, then by rank.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ssd_jax.devices.record import Record
from ssd_jax.speculation.forks import Forks


def before_last(record: Record, forks: Forks) -> jax.Array:
    """Bonus tokens [B, M] of branches with k < L; -1 of all others, and where candidates end."""
    tokens, length = jnp.asarray(record.proposal.tokens), jnp.asarray(record.proposal.length)
    usable = (forks.k >= 0) & (forks.k < length[:, None])
    k = jnp.clip(forks.k, 0, tokens.shape[1] - 1)
    at_k = jnp.take_along_axis(record.candidates, k[:, :, None], axis=1)  # [B, M, W]
    drafted = jnp.take_along_axis(tokens, k, axis=1)
    # The drafted token is no candidate: those after it move up by one.
    skipped = jnp.cumsum(at_k == drafted[:, :, None], axis=-1)
    rank = jnp.arange(at_k.shape[-1]) - skipped
    match = (rank == forks.rank[:, :, None]) & (at_k != drafted[:, :, None])
    found = jnp.max(jnp.where(match, at_k, -1), axis=-1)
    return jnp.where(usable, found, -1)


def after_last(candidates: jax.Array, record: Record, forks: Forks) -> jax.Array:
    """Bonus tokens [B, M] of branches with k = L, from c_L [B, W]; -1 of all others."""
    usable = forks.k == jnp.asarray(record.proposal.length)[:, None]
    rank = jnp.clip(forks.rank, 0, candidates.shape[1] - 1)
    found = jnp.take_along_axis(candidates, rank, axis=1)
    return jnp.where(usable & (forks.rank < candidates.shape[1]), found, -1)
