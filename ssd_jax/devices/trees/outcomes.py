"""The outcomes of a tree's verification that a draft prepares for.

An outcome is (row, t*): the target's text leaves the tree behind one of its rows by a token that is
none of the row's children. Those prepared for are the likeliest continuations that are not in the
tree, so the speculation cache is the frontier of the tree.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.devices.trees.record import TreeRecord, are_children
from ssd_jax.sampling import topology

_NONE = -jnp.inf  # score of a continuation that is no outcome


class TreeOutcomes(NamedTuple):
    """The outcomes of B slots that M branches are prepared for.

    Attributes:
      row: of the tree; -1 is no branch.
      bonus: t*, or -1.
      rank: of t* among the continuations of the row.
    """

    row: Int32[Array, "B M"]
    bonus: Int32[Array, "B M"]
    rank: Int32[Array, "B M"]


def log_rates_of(
    record: TreeRecord, log_rates: Float32[Array, "B depths classes ranks"]
) -> Float32[Array, "B m+1 ranks"]:
    """The rates of the continuations of each row, which has its depth and gap class."""
    depth = topology.depth_of(topology.paths(record.parents))
    slot = jnp.arange(depth.shape[0])[:, None]
    depth = jnp.minimum(depth, log_rates.shape[1] - 1)
    return log_rates[slot, depth, jnp.maximum(record.gap_class, 0)]


def likeliest_outcomes(
    record: TreeRecord,
    log_rates: Float32[Array, "B m+1 ranks"],
    counts: Int32[Array, "B depths"],
    share: Int32[Array, "2"],
    branches: int,
) -> TreeOutcomes:
    """The outcomes that are likeliest to come true, best first.

    The probability of one is the product of the rates along its path; see `tree_growth`.

    Args:
      record: all rows have run.
      log_rates: of the continuations of each row.
      counts: most branches with each number of accepted tokens: M, or 0 where the text has no room
        for a proposal behind them.
      share: see `roles.Share`.
      branches: M.
    """
    nodes, ranks = record.parents.shape[1], record.candidates.shape[2]
    path = topology.paths(record.parents)
    depth = jnp.minimum(topology.depth_of(path), counts.shape[1] - 1)
    # Where each node is among the continuations of its parent: the last of those that are none.
    siblings = jnp.take_along_axis(record.candidates, record.parents[:, :, None], axis=1)
    is_node = siblings == record.tokens[:, :, None]
    rank = jnp.where(is_node.any(axis=2), jnp.argmax(is_node, axis=2), ranks - 1)
    rate_of_parent = jnp.take_along_axis(log_rates, record.parents[:, :, None], axis=1)
    rate_of_node = jnp.take_along_axis(rate_of_parent, rank[:, :, None], axis=2)[:, :, 0]
    score = jnp.sum(jnp.where(topology.on_path(path, nodes), rate_of_node[:, None], 0.0), axis=2)
    # A continuation that is a child is in the tree.
    is_child = are_children(record)[:, :, None] & (
        record.tokens[:, None, None] == record.candidates[:, :, :, None]
    )
    has_room = jnp.take_along_axis(counts, depth, axis=1) > 0
    usable = (record.exists & has_room)[:, :, None] & (record.candidates >= 0)
    usable &= ~is_child.any(axis=3)
    number, parts = share
    usable &= (jnp.arange(nodes + 1)[:, None] + jnp.arange(ranks)) % parts == number
    scores = jnp.where(usable, score[:, :, None] + log_rates, _NONE).reshape(path.shape[0], -1)
    count = min(branches, scores.shape[1])
    best, index = jax.lax.top_k(scores, count)
    budget = counts.max(axis=1, keepdims=True)
    chosen = (best > _NONE) & (jnp.arange(count) < budget)
    bonus = jnp.take_along_axis(record.candidates.reshape(scores.shape), index, axis=1)
    arrays = (jnp.where(chosen, array, -1) for array in (index // ranks, bonus, index % ranks))
    padding = (0, 0), (0, branches - count)
    return TreeOutcomes(*(jnp.pad(array, padding, constant_values=-1) for array in arrays))
