"""Branches of a token tree, one for each outcome that is prepared for, and their promotion."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ssd_jax.devices.trees import growth as tree_growth
from ssd_jax.devices.trees.growth import Growth, TreeProposal
from ssd_jax.devices.trees.outcomes import TreeOutcomes
from ssd_jax.devices.trees.record import TreeRecord
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.records import Promotion
from ssd_jax.sampling import topology
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.confidence_class import class_of_probability
from ssd_jax.sampling.proposal import Proposal


class TreeExpansion(NamedTuple):
    """M branches of each of B trees.

    Attributes:
      path: [B * M] tokens behind the tree's pending one that lead to the branch, t* the last,
        padded with -1.
      growth: [B * M] trees behind them.
    """

    outcomes: TreeOutcomes
    path: Int32[Array, "branches K+1"]
    growth: Growth


def no_expansion(slots: int, branches: int, shape: TreeShape, support: int = 1) -> TreeExpansion:
    """No branches in any slot; q has N = `support` ids."""
    nothing = jnp.full((slots, branches), -1, jnp.int32)
    return TreeExpansion(
        TreeOutcomes(nothing, nothing, nothing),
        jnp.full((slots * branches, shape.depth + 1), -1, jnp.int32),
        tree_growth.empty(slots * branches, shape, support),
    )


class TreeForks(NamedTuple):
    """Where n = B * M branches leave their trees.

    Attributes:
      depth: number of accepted tokens; 0 too where there is no branch.
      nodes: the accepted nodes in order; anything behind the first `depth`.
      path: see `TreeExpansion`.
    """

    depth: Int32[Array, "n"]
    nodes: Int32[Array, "n K"]
    path: Int32[Array, "n K+1"]


def forks_of(record: TreeRecord, outcomes: TreeOutcomes, shape: TreeShape) -> TreeForks:
    """Where the branches of these outcomes leave the trees."""
    path = jnp.take_along_axis(
        topology.paths(record.parents), jnp.maximum(outcomes.row, 0), axis=1
    ).reshape(-1)
    rows = topology.rows_of(path, shape.depth, shape.nodes)[:, 1:]
    nodes = jnp.maximum(rows - 1, 0)
    slot = jnp.repeat(jnp.arange(record.start.shape[0]), outcomes.row.shape[1])
    accepted = jnp.where(rows > 0, record.tokens[slot[:, None], nodes], -1)
    path_tokens = jnp.concatenate([accepted, outcomes.bonus.reshape(-1, 1)], axis=1)
    return TreeForks(topology.depth_of(path), nodes, path_tokens)


def begin_branches(
    record: TreeRecord,
    outcomes: TreeOutcomes,
    forks: TreeForks,
    shape: TreeShape,
    support: int = 1,
) -> TreeExpansion:
    """Branches whose trees have not grown yet; q has N = `support` ids."""
    exists = outcomes.bonus.reshape(-1) >= 0
    slot = jnp.repeat(jnp.arange(record.start.shape[0]), outcomes.row.shape[1])
    growth = tree_growth.empty(exists.shape[0], shape, support)
    growth = growth._replace(
        start=jnp.where(exists, record.start[slot] + 1 + forks.depth, -1),
        limit=jnp.where(exists, shape.depth, 0),
    )
    return TreeExpansion(outcomes, forks.path, growth)


class PromotedTrees(NamedTuple):
    """New records of B slots.

    Attributes:
      run: of each node in its branch (see `tree_growth.Runs`); -1 where it has not run.
      proposal: the records' nodes, with the q that they were drawn from; see
        `tree_growth.Continuations`.
    """

    record: TreeRecord
    run: Int32[Array, "B m"]
    proposal: Proposal


def promote(expansion: TreeExpansion, promotion: Promotion, shape: TreeShape) -> PromotedTrees:
    """New records: of the branches that came true, and of given tokens, which are point masses.

    The tokens are those of the promotion in either case: a branch may have grown since it was read,
    and its best nodes may be others.
    """
    assert promotion.parents is not None
    winner, limit = jnp.asarray(promotion.winner), jnp.asarray(promotion.limit)
    slots = winner.shape[0]
    branches = expansion.path.shape[0] // slots
    hit = winner >= 0
    flat = jnp.arange(slots) * branches + jnp.maximum(winner, 0)
    growth: Growth = jax.tree.map(lambda array: array[flat], expansion.growth)
    tokens, parents = jnp.asarray(promotion.tokens), jnp.asarray(promotion.parents)
    runs = tree_growth.runs_of(growth, tokens, parents, shape)
    rows = jnp.arange(shape.nodes + 1)
    run = jnp.where(hit[:, None] & (rows <= limit[:, None]), runs, -1)
    drawn_from = jnp.maximum(jnp.take_along_axis(runs, parents, axis=1), 0)[:, :, None]
    is_first = jnp.arange(growth.q.shape[2]) == 0
    point_mass, of_branch = jnp.where(is_first, tokens[:, :, None], -1), hit[:, None, None]
    support = jnp.take_along_axis(growth.support, drawn_from, axis=1)
    q = jnp.take_along_axis(growth.q, drawn_from, axis=1)
    proposal = Proposal(
        tokens,
        limit,
        jnp.where(of_branch, support, point_mass),
        jnp.where(of_branch, q, is_first.astype(jnp.float32)),
    )
    has_run = run >= 0
    gap_class = jnp.take_along_axis(growth.runs.gap_class, jnp.maximum(run, 0), axis=1)
    record = TreeRecord(
        start=jnp.asarray(promotion.position),
        pending=jnp.asarray(promotion.pending),
        tokens=tokens,
        parents=parents,
        length=limit,
        has_run=has_run,
        candidates=_continuations(growth, run, shape),
        gap_class=jnp.where(has_run, gap_class, -1),
        q_class=jnp.where(hit[:, None], _q_classes(proposal), UNKNOWN),
    )
    return PromotedTrees(record, run[:, 1:], proposal)


def with_trees(
    record: TreeRecord,
    growth: Growth,
    tree: TreeProposal,
    slots: Bool[Array, "B"],
    shape: TreeShape,
) -> TreeRecord:
    """The records, with trees behind their pending tokens in some slots.

    Args:
      growth, tree: how the trees grew, and what they are.
      shape: of the trees, which may have other runs than those of branches.
    """

    def chosen(of_tree: Any, of_record: Array) -> Array:
        return jnp.where(jnp.expand_dims(slots, range(1, of_record.ndim)), of_tree, of_record)

    return record._replace(
        tokens=chosen(tree.proposal.tokens, record.tokens),
        parents=chosen(tree.parents, record.parents),
        length=chosen(tree.proposal.length, record.length),
        has_run=chosen(tree.run >= 0, record.has_run),
        candidates=chosen(_continuations(growth, tree.run, shape), record.candidates),
        gap_class=chosen(tree.gap_class, record.gap_class),
        q_class=chosen(_q_classes(tree.proposal), record.q_class),
    )


def _q_classes(proposal: Proposal) -> Int32[Array, "B m"]:
    """The class of the probability that each node was drawn with."""
    is_token = proposal.support == proposal.tokens[:, :, None]
    return class_of_probability(jnp.sum(jnp.where(is_token, proposal.q, 0.0), axis=2))


def _continuations(
    growth: Growth, run: Int32[Array, "B m+1"], shape: TreeShape
) -> Int32[Array, "B m+1 ranks"]:
    """The ranked continuations of these runs, -1 where a row has none."""
    of_run = growth.tokens.reshape(run.shape[0], -1, shape.ranks)
    candidates = jnp.take_along_axis(of_run, jnp.maximum(run, 0)[:, :, None], axis=1)
    return jnp.where(run[:, :, None] >= 0, candidates, -1)
