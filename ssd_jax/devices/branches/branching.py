"""Branches of a record: one for each verification outcome (k, t*) that is prepared for.

The fan-out F_k is the number of bonus tokens that are prepared for k accepted tokens. For k < L
they are the best candidates of c_k other than s_{k+1}, which cannot be the bonus token there; for
k = L the best of c_L, which the draft knows only after running s_L. Branches are numbered by
k, then by rank.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ssd_jax.devices.draft.record import Record


class Expansion(NamedTuple):
    """M branches of each of B records.

    Attributes:
      records: [B * M] records of the branches; their lengths count the tokens so far.
      path: tokens after the record's pending one that lead to the branch,
        the bonus token last, padded with -1.
    """

    records: Record
    path: Int32[Array, "B path"]


class Forks(NamedTuple):
    """Where M branches of each of B sequences fork from their records.

    Attributes:
      k: accepted tokens of the outcome; -1 is an unused branch.
      rank: place of its bonus token among the candidates of the same k.
      first: whether it is the first branch of its k.
    """

    k: Int32[Array, "B M"]
    rank: Int32[Array, "B M"]
    first: Bool[Array, "B M"]


def place_forks(counts: Int32[Array, "B F"], skip: Int32[Array, "B F"], branches: int) -> Forks:
    """Numbers the branches of fan-outs F that sum to M = `branches` or less.

    The first `skip` ranks of each k are left out.
    """
    index, ends = jnp.arange(branches), counts.cumsum(axis=1)
    ended = index[:, None] >= ends[:, None, :]  # [B, M, K + 1]
    used = index < ends[:, -1:]
    first = (ended * ends[:, None, :]).max(axis=-1)
    k, local = (ended.sum(axis=-1) + 1) * used - 1, (index - first) * used
    skipped = jnp.take_along_axis(skip, jnp.maximum(k, 0), axis=1)
    return Forks(k, local + skipped * used, local == 0)


def early_bonus_tokens(record: Record, forks: Forks) -> Int32[Array, "B M"]:
    """Bonus tokens of branches with k < L; -1 for all others, and where candidates run out."""
    tokens, length = record.proposal.tokens, record.proposal.length
    usable = (forks.k >= 0) & (forks.k < length[:, None])
    k = jnp.clip(forks.k, 0, tokens.shape[1] - 1)
    at_k = jnp.take_along_axis(record.candidates, k[:, :, None], axis=1)  # [B, M, W]
    drafted = jnp.take_along_axis(tokens, k, axis=1)
    # The drafted token is no candidate: those after it move up by one.
    skipped = jnp.cumsum(at_k == drafted[:, :, None], axis=-1)
    rank = jnp.arange(at_k.shape[-1]) - skipped
    match = (rank == forks.rank[:, :, None]) & (at_k != drafted[:, :, None])
    bonus = jnp.max(jnp.where(match, at_k, -1), axis=-1)
    return jnp.where(usable, bonus, -1)


def tail_bonus_tokens(
    candidates: Int32[Array, "B W"], record: Record, forks: Forks
) -> Int32[Array, "B M"]:
    """Bonus tokens of branches with k = L, from c_L; -1 for all others."""
    usable = forks.k == record.proposal.length[:, None]
    rank = jnp.clip(forks.rank, 0, candidates.shape[1] - 1)
    bonus = jnp.take_along_axis(candidates, rank, axis=1)
    return jnp.where(usable & (forks.rank < candidates.shape[1]), bonus, -1)
