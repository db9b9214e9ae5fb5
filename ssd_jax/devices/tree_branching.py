"""Branches of a token tree: one for each verification outcome that is prepared for.

An outcome is (row, t*): the target's text leaves the tree behind one of its rows by a token that is
none of the row's children. The outcomes that a draft prepares for are the likeliest continuations
that are not in the tree, so the speculation cache is the frontier of the tree.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.devices import tree_growth
from ssd_jax.devices.tree_growth import Growth, TreeProposal
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.records import Promotion
from ssd_jax.sampling import topology
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.ranking import Ranking

_NONE = -jnp.inf  # score of a continuation that is no outcome


class TreeRecord(NamedTuple):
    """The trees of B slots that the target verifies.

    Attributes:
      start: position of the pending token; -1 is an idle slot.
      pending: that token.
      tokens, parents: of the nodes; see `topology`.
      length: number of nodes; others do not count.
      has_run: whether the draft has run each row, so that its key and value are there.
      candidates: the ranked continuations of each row that has run, -1 where there are none.
      gap_class: of each row; -1 where it has not run. Where a rule compares p with q, both are of
        other things in sampled rows; see `tree_residuals`.
    """

    start: Int32[Array, "B"]
    pending: Int32[Array, "B"]
    tokens: Int32[Array, "B m"]
    parents: Int32[Array, "B m"]
    length: Int32[Array, "B"]
    has_run: Bool[Array, "B m+1"]
    candidates: Int32[Array, "B m+1 ranks"]
    gap_class: Int32[Array, "B m+1"]

    @property
    def exists(self) -> Bool[Array, "B m+1"]:
        """Whether each row is one of the tree."""
        rows = jnp.arange(self.has_run.shape[1])
        return (self.start >= 0)[:, None] & (rows <= self.length[:, None])


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


def no_record(slots: int, shape: TreeShape) -> TreeRecord:
    """Idle slots."""
    rows = slots, shape.nodes + 1
    zero = jnp.zeros(slots, jnp.int32)
    nodes = jnp.zeros((slots, shape.nodes), jnp.int32)
    return TreeRecord(
        jnp.full(slots, -1, jnp.int32),
        zero,
        nodes,
        nodes,
        zero,
        jnp.zeros(rows, bool),
        jnp.full((*rows, shape.ranks), -1, jnp.int32),
        jnp.full(rows, -1, jnp.int32),
    )


def no_expansion(slots: int, branches: int, shape: TreeShape, support: int = 1) -> TreeExpansion:
    """No branches in any slot; q has N = `support` ids."""
    nothing = jnp.full((slots, branches), -1, jnp.int32)
    return TreeExpansion(
        TreeOutcomes(nothing, nothing, nothing),
        jnp.full((slots * branches, shape.depth + 1), -1, jnp.int32),
        tree_growth.empty(slots * branches, shape, support),
    )


def add_ranking(record: TreeRecord, ranking: Ranking, ran: Bool[Array, "B m+1"]) -> TreeRecord:
    """The record with the continuations of rows that have just been run.

    Args:
      ranking: of all rows, [B * (m + 1)]; used where `ran`.
    """
    candidates = ranking.tokens.reshape(record.candidates.shape)
    return record._replace(
        has_run=record.has_run | ran,
        candidates=jnp.where(ran[:, :, None], candidates, record.candidates),
        gap_class=jnp.where(ran, ranking.gap_class.reshape(ran.shape), record.gap_class),
    )


def are_children(record: TreeRecord) -> Bool[Array, "B m+1 m"]:
    """Whether each node is a child of each row."""
    rows = jnp.arange(record.has_run.shape[1])
    return (record.parents[:, None] == rows[:, None]) & record.exists[:, None, 1:]


def likeliest_outcomes(
    record: TreeRecord,
    log_rates: Float32[Array, "B depths classes ranks"],
    counts: Int32[Array, "B depths"],
    share: Int32[Array, "2"],
    branches: int,
) -> TreeOutcomes:
    """The outcomes that are likeliest to come true, best first.

    The probability of one is the product of the rates along its path; see `tree_growth`.

    Args:
      record: all rows have run.
      log_rates: of continuations, by depth of their row, gap class and rank.
      counts: most branches with each number of accepted tokens: M, or 0 where the text has no room
        for a proposal behind them.
      share: see `roles.Share`.
      branches: M.
    """
    nodes, ranks = record.parents.shape[1], record.candidates.shape[2]
    path = topology.paths(record.parents)
    depth = jnp.minimum(topology.depth_of(path), log_rates.shape[1] - 1)
    slot = jnp.arange(path.shape[0])[:, None]
    log_rate = log_rates[slot, depth, jnp.maximum(record.gap_class, 0)]  # [B, m + 1, ranks]
    # Where each node is among the continuations of its parent: the last of those that are none.
    siblings = jnp.take_along_axis(record.candidates, record.parents[:, :, None], axis=1)
    is_node = siblings == record.tokens[:, :, None]
    rank = jnp.where(is_node.any(axis=2), jnp.argmax(is_node, axis=2), ranks - 1)
    rate_of_parent = jnp.take_along_axis(log_rate, record.parents[:, :, None], axis=1)
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
    scores = jnp.where(usable, score[:, :, None] + log_rate, _NONE).reshape(path.shape[0], -1)
    count = min(branches, scores.shape[1])
    best, index = jax.lax.top_k(scores, count)
    budget = counts.max(axis=1, keepdims=True)
    chosen = (best > _NONE) & (jnp.arange(count) < budget)
    bonus = jnp.take_along_axis(record.candidates.reshape(scores.shape), index, axis=1)
    arrays = (jnp.where(chosen, array, -1) for array in (index // ranks, bonus, index % ranks))
    padding = (0, 0), (0, branches - count)
    return TreeOutcomes(*(jnp.pad(array, padding, constant_values=-1) for array in arrays))


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


def begun(
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


def promoted(expansion: TreeExpansion, promotion: Promotion, shape: TreeShape) -> PromotedTrees:
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
    )
    drawn_from = jnp.maximum(jnp.take_along_axis(runs, parents, axis=1), 0)[:, :, None]
    is_first = jnp.arange(growth.q.shape[2]) == 0
    given, of_branch = jnp.where(is_first, tokens[:, :, None], -1), hit[:, None, None]
    support = jnp.take_along_axis(growth.support, drawn_from, axis=1)
    q = jnp.take_along_axis(growth.q, drawn_from, axis=1)
    proposal = Proposal(
        tokens,
        limit,
        jnp.where(of_branch, support, given),
        jnp.where(of_branch, q, is_first.astype(jnp.float32)),
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
    )


def _continuations(
    growth: Growth, run: Int32[Array, "B m+1"], shape: TreeShape
) -> Int32[Array, "B m+1 ranks"]:
    """The ranked continuations of these runs, -1 where a row has none."""
    of_run = growth.tokens.reshape(run.shape[0], -1, shape.ranks)
    candidates = jnp.take_along_axis(of_run, jnp.maximum(run, 0)[:, :, None], axis=1)
    return jnp.where(run[:, :, None] >= 0, candidates, -1)
