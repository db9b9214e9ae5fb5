"""Traversal verification (Weng et al., arXiv 2505.12398): block verification of a token tree.

The children of a row were drawn from q one after the other, without replacement. The tree is judged
from its leaves on: its first leaf is accepted, with the path to it, with the probability a that a
text comes there. Else it is deleted, and the first leaf of what is left is judged. A row begins
with P = p, Q = q and with

    a = 1 at the pending token,      a = min(1, a P(x) / Q(x)) at a child x, of its parent's a, P, Q

If x is deleted, its parent has S = sum of max(a P - Q, 0), and then P = max(a P - Q, 0) / S, Q
without x, normalised, and a = S / (S + 1 - a). The bonus is drawn from P of the row that is
accepted. A chain is judged as by block verification, by the same noise. In expectation at least as
many tokens are accepted as by recursive rejection.

Where a = 1 it stays 1, and a child x with a P(x) > Q(x) has a = 1 and is never deleted: so the
bonus is none of the children of its row. Outside the support of q, P is p times a number: that
number and the support are all that is kept. Which nodes there are may not depend on what was drawn
from a q.
"""

from __future__ import annotations

from functools import partial
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
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.topology import Parents
from ssd_jax.sampling.variants import when


class Laws(NamedTuple):
    """The distributions behind the rows of B trees, and the tokens that were drawn there.

    Attributes:
      support: of the children of a row; -1 elsewhere, and where a row has none.
      p: of these.
      elsewhere: sum of p over all others.
      is_sound: whether there is a p.
    """

    support: Int32[Array, "B R N"]
    p: Float32[Array, "B R N"]
    elsewhere: Float32[Array, "B R"]
    is_sound: Bool[Array, "B R"]


class Remaining(NamedTuple):
    """What is left of B trees.

    Attributes:
      row: that is judged next, or that was accepted.
      ended: whether it was accepted.
      remains: whether a node has not been deleted.
      survival: a of each row; of those that have not been judged, anything.
      p: P on the support; `scale` times p elsewhere.
      q, q_total: Q is q / q_total.
    """

    row: Int32[Array, "B"]
    ended: Bool[Array, "B"]
    remains: Bool[Array, "B m"]
    survival: Float32[Array, "B R"]
    p: Float32[Array, "B R N"]
    scale: Float32[Array, "B R"]
    q: Float32[Array, "B R N"]
    q_total: Float32[Array, "B R"]


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
    nodes = nodes_of(proposal, sampling, start, parents)
    q, laws = _laws(target, positions, nodes)
    one = jnp.ones((batch, count + 1))
    begin = Remaining(
        jnp.zeros(batch, jnp.int32),
        jnp.zeros(batch, bool),
        nodes.exists,
        one,
        laws.p,
        one,
        q,
        one,
    )
    # A node is come to once, and deleted at most once.
    most = 2 * count + 1
    end = repeat(partial(_step, laws, nodes), begin, lambda now: ~now.ended, most, target)

    def draw(at: Positions, support, p, scale, key: keys.Key) -> Int32[Array, "n"]:
        of_row = target.probs_at(at)
        on_support = dense(support, jnp.ones_like(p), of_row.shape[1]) > 0
        weights = jnp.where(on_support, dense(support, p, of_row.shape[1]), scale[:, None] * of_row)
        return draw_by(weights, key, target)

    index = jnp.arange(batch) * (count + 1) + end.row
    final = jax.tree.map(lambda array: take_rows(array, index), positions)
    key = keys.derive(sampling.seed, sampling.request, start, final.position, Purpose.BONUS)
    of_row = (take_column(array, end.row) for array in (laws.support, end.p, end.scale))
    bonus = map_rows(draw, final, *of_row, key)
    path = take_column(topology.paths(parents), end.row)
    return Outcome(topology.depth_of(path), bonus, path)


def _laws(
    target: TargetProbs, positions: Positions, nodes: Nodes
) -> tuple[Float32[Array, "B R N"], Laws]:
    """q of the children of each row, which is that of the first, and p there."""
    batch, count = nodes.parents.shape
    first = _first_children(nodes.exists, nodes.parents)
    has_children, node = first < count, jnp.minimum(first, count - 1)[:, :, None]
    support, q = (jnp.take_along_axis(array, node, axis=1) for array in (nodes.support, nodes.q))
    q = jnp.where(has_children[:, :, None], q, 0.0)
    support = jnp.where(q > 0, support, -1)

    def at_support(block: Positions, support: jax.Array) -> tuple[jax.Array, ...]:
        p = target.probs_at(block)
        on = jnp.take_along_axis(p, jnp.maximum(support, 0), axis=1)
        on_support = dense(support, jnp.ones(support.shape), p.shape[1]) > 0
        elsewhere = row_sum(jnp.where(on_support, 0.0, p))[:, 0]
        return jnp.where(support >= 0, on, 0.0), elsewhere, jnp.any(p > 0, axis=-1)

    def where_needed(block: Positions, support: jax.Array) -> tuple[jax.Array, ...]:
        nothing = jnp.zeros(support.shape), jnp.zeros(len(support)), jnp.ones(len(support), bool)
        return when(
            None if target.uses_cond else True,
            jnp.any(support >= 0),
            lambda: at_support(block, support),
            lambda: nothing,
        )

    flat = support.reshape(batch * (count + 1), -1)
    p, *others = map_rows(where_needed, positions, flat)
    elsewhere, is_sound = (array.reshape(batch, -1) for array in others)
    return q, Laws(support, p.reshape(support.shape), elsewhere, is_sound)


def _step(laws: Laws, nodes: Nodes, now: Remaining) -> Remaining:
    """Goes on to the first child of each row, or judges the row where there is none."""
    tokens, parents = nodes.tokens, nodes.parents
    every, count = jnp.arange(now.row.shape[0]), parents.shape[1]
    child = take_column(_first_children(now.remains, parents), now.row)
    descends = ~now.ended & (child < count)
    child = jnp.minimum(child, count - 1)
    survival = now.survival.at[every, jnp.where(descends, child + 1, count + 1)].set(
        _survival(laws, take_column(tokens, child), now), mode="drop"
    )
    is_leaf, node = ~now.ended & ~descends, jnp.maximum(now.row - 1, 0)
    arrives = take_column(now.survival, now.row)
    accepts = is_leaf & ((now.row == 0) | (take_column(nodes.u, node) < arrives))
    deletes, above = is_leaf & ~accepts, take_column(parents, node)
    left = _without(laws, take_column(tokens, node), above, now)
    row = jnp.where(deletes, above, count + 1)  # none where nothing is deleted

    def changed(of_rows: jax.Array, of_row: jax.Array) -> jax.Array:
        return of_rows.at[every, row].set(of_row, mode="drop")

    return Remaining(
        jnp.where(descends, child + 1, jnp.where(deletes, above, now.row)),
        now.ended | accepts,
        now.remains.at[every, jnp.where(deletes, node, count)].set(False, mode="drop"),
        changed(survival, left.survival),
        changed(now.p, left.p),
        changed(now.scale, left.scale),
        changed(now.q, left.q),
        changed(now.q_total, left.q_total),
    )


def _survival(laws: Laws, token: Int32[Array, "B"], now: Remaining) -> Float32[Array, "B"]:
    """The probability that a text comes to a child of the row."""
    is_token = take_column(laws.support, now.row) == token[:, None]
    p, q = (
        jnp.sum(jnp.where(is_token, take_column(array, now.row), 0.0), axis=1)
        for array in (now.p, now.q)
    )
    total = take_column(now.q_total, now.row)
    odds = take_column(now.survival, now.row) * p * total
    return jnp.where(q > 0, jnp.minimum(odds / jnp.where(q > 0, q, 1.0), 1.0), 0.0)


class _RowLeft(NamedTuple):
    """What is left at a row; see `Remaining`."""

    survival: Float32[Array, "B"]
    p: Float32[Array, "B N"]
    scale: Float32[Array, "B"]
    q: Float32[Array, "B N"]
    q_total: Float32[Array, "B"]


def _without(
    laws: Laws, token: Int32[Array, "B"], row: Int32[Array, "B"], now: Remaining
) -> _RowLeft:
    """What is left at a row when a child with this token has been deleted."""
    a, p, scale, q, total = (
        take_column(array, row) for array in (now.survival, now.p, now.scale, now.q, now.q_total)
    )
    divisor = jnp.where(total > 0, total, 1.0)[:, None]
    surplus, further = jnp.maximum(a[:, None] * p - q / divisor, 0.0), a * scale
    s = row_sum(surplus)[:, 0] + further * take_column(laws.elsewhere, row)
    # If rounding left nothing, a P and Q are equal in float32: P stays. Without a p the tree ends.
    changes = (s > 0) & take_column(laws.is_sound, row)
    safe = jnp.where(changes, s, 1.0)
    q_left = jnp.where(take_column(laws.support, row) == token[:, None], 0.0, q)
    return _RowLeft(
        jnp.where(take_column(laws.is_sound, row) & (a < 1), s / (s + (1 - a)), a),
        jnp.where(changes[:, None], surplus / safe[:, None], p),
        jnp.where(changes, further / safe, scale),
        q_left,
        row_sum(q_left)[:, 0],
    )


def _first_children(remains: Bool[Array, "B m"], parents: Parents) -> Int32[Array, "B R"]:
    """The first child of every row; m where there is none."""
    rows = jnp.arange(parents.shape[1] + 1)
    return first_child(remains, parents, jnp.broadcast_to(rows, (parents.shape[0], rows.size)))
