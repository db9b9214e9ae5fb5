"""Recursive rejection (SpecInfer, Miao et al., arXiv 2305.09781; without replacement, Sequoia, Chen
et al., arXiv 2402.12374): the ratio rule where a token has several proposals.

The children of a row were drawn from q one after the other, without replacement. They are judged
in that order, by P = p and Q = q at first: x is accepted with u < P(x) / Q(x), and the walk goes on
behind it. Else P becomes max(P - Q, 0) and Q loses x, both are normalised, and the next child is
judged. The bonus is drawn from what is left of P where no child is accepted. A chain is judged as
by the ratio rule, by the same noise.

Which nodes there are may not depend on what was drawn from a q: see `speculation.fixed_rates`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.rows import map_rows, row_sum, take_rows
from ssd_jax.kernels.sparse import dense
from ssd_jax.kernels.verify.positions import Outcome, Positions, TargetProbs
from ssd_jax.sampling import keys, topology
from ssd_jax.sampling.judgement.nodes import Nodes, draw_by, first_child, nodes_of, repeat
from ssd_jax.sampling.judgement.outcome import take_column
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.topology import Parents
from ssd_jax.sampling.variants import when


class Walk(NamedTuple):
    """Where n sequences are: P is weights / total, Q is q / q_total on the children's support.

    Attributes:
      row: whose children are judged.
      node: the next of them; m where there is none.
      weights, total: P at that row, as far as children have been rejected.
      q, q_total: Q of the next child; q is not yet known where `is_first`.
    """

    row: Int32[Array, "n"]
    node: Int32[Array, "n"]
    is_first: Bool[Array, "n"]
    weights: Float32[Array, "n V"]
    total: Float32[Array, "n"]
    q: Float32[Array, "n N"]
    q_total: Float32[Array, "n"]


def judge(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    parents: Parents,
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones; see `judgement.judge`."""
    batch, count = parents.shape
    width, every = count + 1, jnp.arange(batch)

    def at(sequence: Int32[Array, "n"], row: Int32[Array, "n"]) -> Positions:
        return jax.tree.map(lambda a: take_rows(a, sequence * width + row), positions)

    def walk(
        p: Float32[Array, "n V"], nodes: Nodes, sequence: Int32[Array, "n"]
    ) -> tuple[Int32[Array, "n"], jax.Array]:
        """The row where each sequence ends, and the weights that its bonus is drawn by."""
        rows = p.shape[0]
        none, one = jnp.zeros(rows, jnp.int32), jnp.ones(rows)
        no_q = jnp.zeros((rows, nodes.q.shape[2]))
        begin = Walk(none, _next_child(nodes, none, none), none == 0, p, one, no_q, one)

        def step(now: Walk) -> Walk:
            return _step(target, nodes, now, lambda row: target.probs_at(at(sequence, row)))

        end = repeat(step, begin, lambda now: now.node < count, count, target)
        return end.row, end.weights

    def walk_and_draw(
        root: Positions, path: jax.Array, nodes: Nodes, sequence: Int32[Array, "n"]
    ) -> tuple[jax.Array, ...]:
        row, weights = walk(target.probs_at(root), nodes, sequence)
        path = take_column(path, row)
        begin, settings = start[sequence], sampling_of(sampling, sequence)
        position = begin + 1 + topology.depth_of(path)
        key = keys.derive(settings.seed, settings.request, begin, position, Purpose.BONUS)
        return path, draw_by(weights, key, target)

    root, paths = at(every, jnp.zeros_like(every)), topology.paths(parents)
    nodes = nodes_of(proposal, sampling, start, parents)
    path, bonus = map_rows(walk_and_draw, root, paths, nodes, every)
    return Outcome(topology.depth_of(path), bonus, path)


def _step(
    target: TargetProbs,
    nodes: Nodes,
    now: Walk,
    probs_at_row: Callable[[Int32[Array, "n"]], Float32[Array, "n V"]],
) -> Walk:
    """Judges one child of each sequence that still has one."""
    count = nodes.tokens.shape[1]
    judged, node = now.node < count, jnp.minimum(now.node, count - 1)
    token, support = take_column(nodes.tokens, node), take_column(nodes.support, node)
    q = jnp.where(now.is_first[:, None], take_column(nodes.q, node), now.q)
    is_token = support == token[:, None]
    q_token = jnp.sum(jnp.where(is_token, q, 0.0), axis=-1)
    # A law that is used for the first time is not divided: by itself it sums to 1 nearly.
    divisor = jnp.where(now.q_total > 0, now.q_total, 1.0)
    p_token = jnp.take_along_axis(now.weights, token[:, None], axis=1)[:, 0] / now.total
    # u < P / Q without a division; see `ratio`.
    accepts = take_column(nodes.u, node) * (q_token / divisor) < p_token
    accepted = judged & (q_token > 0) & accepts
    rejected = judged & ~accepted

    def remainder() -> tuple[jax.Array, jax.Array]:
        law = dense(support, q / divisor[:, None], now.weights.shape[1])
        left = jnp.maximum(now.weights / now.total[:, None] - law, 0.0)
        # If rounding left nothing, P and Q are equal in float32: P stays.
        changes = rejected & jnp.any(left > 0, axis=-1)
        weights = jnp.where(changes[:, None], left, now.weights)
        return weights, jnp.where(changes, row_sum(left)[:, 0], now.total)

    always = None if target.uses_cond else True
    p_left = now.weights, now.total
    weights, total = when(always, jnp.any(rejected), remainder, lambda: p_left)
    row = jnp.where(accepted, node + 1, now.row)
    weights = when(
        always,
        jnp.any(accepted),
        lambda: jnp.where(accepted[:, None], probs_at_row(row), weights),
        lambda: weights,
    )
    q_left = jnp.where(is_token, 0.0, q)
    following = _next_child(nodes, row, node + 1)
    return Walk(
        row,
        jnp.where(judged, following, now.node),
        jnp.where(judged, accepted, now.is_first),
        weights,
        jnp.where(accepted, 1.0, total),
        jnp.where(rejected[:, None], q_left, now.q),
        jnp.where(accepted, 1.0, jnp.where(rejected, row_sum(q_left)[:, 0], now.q_total)),
    )


def _next_child(
    nodes: Nodes, row: Int32[Array, "n"], begin: Int32[Array, "n"]
) -> Int32[Array, "n"]:
    """The first child of each row among the nodes from `begin` on; m if there is none."""
    begin = begin[:, None, None]
    return first_child(nodes.exists, nodes.parents, row[:, None], begin)[:, 0]
