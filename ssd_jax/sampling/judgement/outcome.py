"""What all rules use to find the outcome of a verification."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32, Shaped

from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.kernels.verify.positions import Outcome
from ssd_jax.sampling import topology
from ssd_jax.sampling.proposal import Proposal


def chain_outcome(accepted: Int32[Array, "B"], bonus: Int32[Array, "B"]) -> Outcome:
    """The outcome of chains."""
    return Outcome(accepted, bonus, chain_path(accepted))


def accept_equal(
    target: Int32[Array, "B W"], proposal: Proposal, parents: topology.Parents | None = None
) -> Outcome:
    """Accepts proposed tokens while they equal the target's own.

    Args:
      target: the target's token behind each row.
      parents: of a tree's nodes; None is a chain. Of equal siblings the first counts.
    """
    if parents is None:
        equal = (proposal.tokens == target[:, :-1]) & is_proposed(proposal)
        accepted = count_leading_true(equal)
        return chain_outcome(accepted, take_column(target, accepted))
    nodes = parents.shape[1]
    tokens = jnp.asarray(proposal.tokens)
    equal = (tokens == jnp.take_along_axis(target, parents, axis=1)) & is_proposed(proposal)
    twins = (parents[:, :, None] == parents[:, None]) & (tokens[:, :, None] == tokens[:, None])
    equal &= ~jnp.any(twins & jnp.tri(nodes, k=-1, dtype=bool), axis=2)
    taken = jnp.sum(jnp.where(equal, 1 << jnp.arange(nodes), 0), axis=1, dtype=jnp.int32)
    paths = topology.paths(parents)
    accepted_rows = paths & ~taken[:, None] == 0
    accepted = jnp.max(jnp.where(accepted_rows, topology.depth_of(paths), 0), axis=1)
    # One row has this depth: no two children of a node are accepted.
    last = jnp.argmax(jnp.where(accepted_rows, topology.depth_of(paths), -1), axis=1)
    return Outcome(accepted, take_column(target, last), take_column(paths, last))


def is_proposed(proposal: Proposal) -> Bool[Array, "B K"]:
    """Positions below L."""
    return jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]


def count_leading_true(flags: Bool[Array, "B K"]) -> Int32[Array, "B"]:
    """Number of leading entries of each row that are true."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def take_column(
    array: Shaped[Array, "B n ..."], index: Int32[Array, "B"]
) -> Shaped[Array, "B ..."]:
    """array[b, index[b]]."""
    expanded = index.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, expanded, axis=1)[:, 0]
