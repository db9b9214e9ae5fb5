"""Growth of token trees: which nodes a draft runs next, and which become the tree.

A draft runs the pending token, then at each depth the `width` best nodes. Each run gives the ranked
continuations of its node as candidates, with the probability that the target's text comes through
them: the product of measured rates of (depth, class of the gap, rank) along the path. The tree is
the m best candidates of all. Since rates are below 1, a node is better than what is behind it, so
the parent of a node of the tree is in the tree. Runs are numbered from 1, the pending token's is 0.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.roles.drafting import TreeShape
from ssd_jax.sampling import topology
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.ranking import Ranking

_NONE = -jnp.inf  # score of a candidate that does not exist


class Runs(NamedTuple):
    """What a draft has run: the pending token, then nodes; R + 1 of each of B rows."""

    token: Int32[Array, "B R+1"]
    candidate: Int32[Array, "B R+1"]  # that it was; -1 before it is run, and for the pending token
    path: Int32[Array, "B R+1"]  # bit r - 1 is run r
    gap_class: Int32[Array, "B R+1"]  # of its continuations; -1 before it is run


class Growth(NamedTuple):
    """Trees of B rows while they grow.

    Attributes:
      start: position of the pending token; -1 is an idle row.
      limit: most tokens of a path.
      tokens, scores: candidates, `ranks` of each run: the token, and log of the probability that
        the target's text comes through it.
      support, q: of the token that was drawn from a run; see `Continuations`.
    """

    start: Int32[Array, "B"]
    limit: Int32[Array, "B"]
    tokens: Int32[Array, "B C"]
    scores: Float32[Array, "B C"]
    support: Int32[Array, "B R+1 N"]
    q: Float32[Array, "B R+1 N"]
    runs: Runs


class Continuations(NamedTuple):
    """What a draft says behind n nodes.

    Attributes:
      support, q: of rows that draw a token, which is then the only one of the ranking; anything in
        others.
    """

    ranking: Ranking
    support: Int32[Array, "n N"]
    q: Float32[Array, "n N"]


class TreeProposal(NamedTuple):
    """The trees of B rows.

    Attributes:
      proposal: the nodes. L is their number; others are children of the pending token.
      parents: see `topology`.
      rank: of each node among its siblings' candidates, from 0.
      run: number of the run of each row; -1 where the draft has not run it.
      gap_class: of each row; -1 where the draft has not run it.
    """

    proposal: Proposal
    parents: Int32[Array, "B m"]
    rank: Int32[Array, "B m"]
    run: Int32[Array, "B m+1"]
    gap_class: Int32[Array, "B m+1"]


class Frontier(NamedTuple):
    """The nodes that are run next, w of each of B rows.

    Attributes:
      tokens: of the nodes.
      path: runs on the path to each, its own included; 0 where there is none.
    """

    tokens: Int32[Array, "B w"]
    candidate: Int32[Array, "B w"]
    path: Int32[Array, "B w"]


def empty(rows: int, shape: TreeShape, support: int = 1) -> Growth:
    """Idle rows; q has N = `support` ids."""
    runs, count = (rows, shape.runs + 1), (rows, (shape.runs + 1) * shape.ranks)
    nothing = jnp.full(runs, -1, jnp.int32)
    return Growth(
        jnp.full(rows, -1, jnp.int32),
        jnp.zeros(rows, jnp.int32),
        jnp.full(count, -1, jnp.int32),
        jnp.full(count, _NONE, jnp.float32),
        jnp.full((*runs, support), -1, jnp.int32),
        jnp.zeros((*runs, support), jnp.float32),
        Runs(jnp.zeros(runs, jnp.int32), nothing, jnp.zeros(runs, jnp.int32), nothing),
    )


def frontier(growth: Growth, depth: Int32[Array, ""], shape: TreeShape) -> Frontier:
    """The best candidates at `depth`, of those whose continuations may still be proposed."""
    parent_depth = jnp.repeat(topology.depth_of(growth.runs.path), shape.ranks, axis=1)
    first = depth == 1  # the pending token's path is empty, as is that of runs to come
    is_root = jnp.arange(parent_depth.shape[1]) < shape.ranks
    at_depth = jnp.where(first, is_root, (parent_depth == depth - 1) & ~is_root)
    open_rows = (growth.start >= 0) & (depth < growth.limit)
    scores = jnp.where(at_depth & open_rows[:, None], growth.scores, _NONE)
    best, candidate = jax.lax.top_k(scores, shape.width)
    exists = best > _NONE
    parent_path = jnp.take_along_axis(growth.runs.path, candidate // shape.ranks, axis=1)
    run = (depth - 1) * shape.width + jnp.arange(shape.width)
    return Frontier(
        jnp.take_along_axis(growth.tokens, candidate, axis=1),
        jnp.where(exists, candidate, -1),
        jnp.where(exists, parent_path | 1 << run, 0),
    )


def add_run(
    growth: Growth,
    ran: Frontier,
    continuations: Continuations,
    depth: Int32[Array, ""],
    log_rates: Float32[Array, "B depths classes ranks"],
    shape: TreeShape,
) -> Growth:
    """Adds the runs of a frontier, whose nodes are at `depth`, and their continuations.

    Args:
      continuations: of the w nodes of each row, n = B * w.
      depth: 0 for the pending tokens, of which a frontier has one a row.
      log_rates: of continuations, by their depth - 1, gap class and rank; below 0.
    """
    rows, width = ran.tokens.shape
    ranking, support, q = continuations
    first = jnp.where(depth == 0, 0, (depth - 1) * shape.width + 1)
    exists = (ran.candidate >= 0) | (depth == 0) & (growth.start[:, None] >= 0)
    gap_class = ranking.gap_class.reshape(rows, width)
    rates = jax.lax.dynamic_index_in_dim(log_rates, depth, axis=1, keepdims=False)
    of_class = jnp.take_along_axis(rates, gap_class[:, :, None], axis=1)  # [B, w, ranks]
    score = jnp.take_along_axis(growth.scores, jnp.maximum(ran.candidate, 0), axis=1)
    score = jnp.where(depth == 0, 0.0, score)
    tokens = ranking.tokens.reshape(rows, width, shape.ranks)
    possible = exists[:, :, None] & (tokens >= 0) & (depth < growth.limit)[:, None, None]
    scores = jnp.where(possible, score[:, :, None] + of_class, _NONE)

    def put(array: Array, values: Array, begin: Array) -> Array:
        return jax.lax.dynamic_update_slice_in_dim(array, values, begin, axis=1)

    runs = Runs(
        put(growth.runs.token, ran.tokens, first),
        put(growth.runs.candidate, ran.candidate, first),
        put(growth.runs.path, ran.path, first),
        put(growth.runs.gap_class, jnp.where(exists, gap_class, -1), first),
    )
    return growth._replace(
        tokens=put(growth.tokens, tokens.reshape(rows, -1), first * shape.ranks),
        scores=put(growth.scores, scores.reshape(rows, -1), first * shape.ranks),
        support=put(growth.support, support.reshape(rows, width, -1), first),
        q=put(growth.q, q.reshape(rows, width, -1), first),
        runs=runs,
    )


def tokens_of_runs(
    growth: Growth, ran: Frontier, depth: Int32[Array, ""], shape: TreeShape
) -> Int32[Array, "B R"]:
    """Tokens of all runs but the pending token's, those of a frontier at `depth` among them."""
    tokens = growth.runs.token[:, 1:]
    if not shape.runs:
        return tokens
    begin = jnp.maximum(depth - 1, 0) * shape.width
    added = jax.lax.dynamic_update_slice_in_dim(tokens, ran.tokens, begin, axis=1)
    return jnp.where(depth > 0, added, tokens)


def propose(growth: Growth, shape: TreeShape) -> TreeProposal:
    """The trees of the best candidates so far."""
    count, nodes = growth.scores.shape[1], min(shape.nodes, growth.scores.shape[1])
    best, candidate = jax.lax.top_k(growth.scores, nodes)
    exists = best > _NONE
    # Parents come before children, since runs do.
    candidate = jnp.sort(jnp.where(exists, candidate, count), axis=1)
    candidate = jnp.pad(candidate, ((0, 0), (0, shape.nodes - nodes)), constant_values=count)
    exists = candidate < count
    index = jnp.minimum(candidate, count - 1)
    parent_run = index // shape.ranks
    parent_candidate = jnp.take_along_axis(growth.runs.candidate, parent_run, axis=1)
    is_parent = parent_candidate[:, :, None] == candidate[:, None]  # [B, m, m]
    parents = jnp.where(exists & (parent_run > 0), jnp.argmax(is_parent, axis=2) + 1, 0)
    is_run = growth.runs.candidate[:, None] == candidate[:, :, None]  # [B, m, R + 1]
    run = jnp.where(exists & is_run.any(axis=2), jnp.argmax(is_run, axis=2), -1)
    run = jnp.pad(run.astype(jnp.int32), ((0, 0), (1, 0)))
    gap_class = jnp.take_along_axis(growth.runs.gap_class, jnp.maximum(run, 0), axis=1)
    proposal = Proposal(
        jnp.where(exists, jnp.take_along_axis(growth.tokens, index, axis=1), 0),
        jnp.sum(exists, axis=1, dtype=jnp.int32),
        jnp.take_along_axis(growth.support, parent_run[:, :, None], axis=1),
        jnp.take_along_axis(growth.q, parent_run[:, :, None], axis=1),
    )
    return TreeProposal(
        proposal,
        parents.astype(jnp.int32),
        jnp.where(exists, index % shape.ranks, -1),
        run,
        jnp.where(run >= 0, gap_class, -1),
    )


def runs_of(
    growth: Growth, tokens: Int32[Array, "B m"], parents: Int32[Array, "B m"], shape: TreeShape
) -> Int32[Array, "B m+1"]:
    """The runs of a tree's rows, which was proposed from these candidates; -1 where none has run.

    It may have been proposed when there were fewer.
    """
    of_run = growth.tokens.reshape(tokens.shape[0], -1, shape.ranks)

    def add_row(node: Int32[Array, ""], runs: Int32[Array, "B m+1"]) -> Int32[Array, "B m+1"]:
        parent = jnp.take_along_axis(runs, parents[:, node][:, None], axis=1)  # [B, 1]
        siblings = jnp.take_along_axis(of_run, jnp.maximum(parent, 0)[:, :, None], axis=1)[:, 0]
        is_node = siblings == tokens[:, node][:, None]
        candidate = parent * shape.ranks + jnp.argmax(is_node, axis=1)[:, None]
        is_run = growth.runs.candidate == candidate
        has_run = (parent[:, 0] >= 0) & is_node.any(axis=1) & is_run.any(axis=1)
        run = jnp.where(has_run, jnp.argmax(is_run, axis=1), -1).astype(jnp.int32)
        return runs.at[:, node + 1].set(run)

    rows = jnp.pad(jnp.full(tokens.shape, -1, jnp.int32), ((0, 0), (1, 0)))
    return jax.lax.fori_loop(0, tokens.shape[1], add_row, rows)


def learnable(proposal: TreeProposal) -> Int32[Array, "B 3*m+1"]:
    """What hosts learn rates from: parents, rank and gap class, side by side."""
    return jnp.concatenate([proposal.parents, proposal.rank, proposal.gap_class], axis=1)


def accepted_runs(
    growth: Growth, proposal: TreeProposal, node: Int32[Array, "B"]
) -> tuple[Int32[Array, "B"], Bool[Array, "B"]]:
    """The runs on the path to a row of each tree, and whether the row itself was run.

    All rows of the path but the last were run, since they have children.
    """
    at = node[:, None]
    parent = jnp.take_along_axis(jnp.pad(proposal.parents, ((0, 0), (1, 0))), at, axis=1)
    run = jnp.take_along_axis(proposal.run, at, axis=1)
    was_run = run >= 0
    last = jnp.where(was_run, run, jnp.take_along_axis(proposal.run, parent, axis=1))
    path = jnp.take_along_axis(growth.runs.path, jnp.maximum(last, 0), axis=1)
    return path[:, 0], was_run[:, 0]
