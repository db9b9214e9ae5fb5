"""The token trees that a target verifies, as a draft that branches off them keeps them."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int32

from ssd_jax.roles.drafting import TreeShape
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.ranking import Ranking


class TreeRecord(NamedTuple):
    """The trees of B slots that the target verifies.

    Attributes:
      start: position of the pending token; -1 is an idle slot.
      pending: that token.
      tokens, parents: of the nodes; see `topology`.
      length: number of nodes; others do not count.
      has_run: whether the draft has run each row, so that its key and value are there.
      candidates: the ranked continuations of each row that has run, -1 where there are none.
      gap_class: of each row; -1 where it has not run.
      q_class: of the probability that each node was drawn with; `UNKNOWN` where the draft did not
        draw it. In sampled rows of a rule that compares p with q, outcomes are expected by it, and
        `candidates` are of other things; see `residuals`.
    """

    start: Int32[Array, "B"]
    pending: Int32[Array, "B"]
    tokens: Int32[Array, "B m"]
    parents: Int32[Array, "B m"]
    length: Int32[Array, "B"]
    has_run: Bool[Array, "B m+1"]
    candidates: Int32[Array, "B m+1 ranks"]
    gap_class: Int32[Array, "B m+1"]
    q_class: Int32[Array, "B m"]

    @property
    def exists(self) -> Bool[Array, "B m+1"]:
        """Whether each row is one of the tree."""
        rows = jnp.arange(self.has_run.shape[1])
        return (self.start >= 0)[:, None] & (rows <= self.length[:, None])


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
        jnp.full(nodes.shape, UNKNOWN, jnp.int32),
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
