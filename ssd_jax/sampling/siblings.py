"""Draws the children of a tree's node, without replacement, from one q that is kept for the rule.

The n tokens of largest log q + noise are those that q would draw one after the other, each from
what the ones before left of it. The noise is the node's own.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.sampling import keys
from ssd_jax.sampling.drafting import sparse_probs
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.outputs import Outputs
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.probs import allowed_logits
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import ON_DEVICE, Parts, when


class Siblings(NamedTuple):
    """Children of B nodes; anything in greedy rows.

    Attributes:
      tokens: in the order drawn; -1 where q has no more.
      support: ids, padded with -1.
      q: that the first was drawn from.
    """

    tokens: Int32[Array, "B n"]
    support: Int32[Array, "B N"]
    q: Float32[Array, "B N"]


class Place(NamedTuple):
    """B nodes of trees.

    Attributes:
      start: position of the round's pending token.
      depth: number of proposed tokens up to the node, itself included.
      number: of the node in its round; on a chain its depth.
    """

    start: Int32[Array, "B"]
    depth: Int32[Array, "B"]
    number: Int32[Array, "B"]


def draw_siblings(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    place: Place,
    get_history: GetHistory,
    *,
    tokens: int,
    count: int,
    support: int,
    outputs: Outputs = None,
    parts: Parts = ON_DEVICE,
) -> Siblings:
    """Draws the tokens behind nodes; `drafting.draw` gives the first one on a chain.

    Args:
      logits: the draft's; V is N with `outputs`.
      place: of the nodes that the logits follow.
      count: n, number of siblings.
      sampling, get_history, tokens, support, outputs, parts: see `drafting.draw`.
    """
    support = min(support, logits.shape[1])

    def sampled() -> Siblings:
        position = place.start + 1 + place.depth
        allowed = allowed_logits(
            logits, sampling, position, get_history, tokens, outputs, parts.adjusted
        )
        q, ids = sparse_probs(allowed, support, sampling, outputs, parts)
        key = keys.derive(sampling.seed, sampling.request, place.start, place.number, Purpose.DRAFT)
        scores = jnp.log(q) + keys.gumbel_of(key, ids)
        best, index = jax.lax.top_k(scores, min(count, support))
        drawn = jnp.where(best > -jnp.inf, jnp.take_along_axis(ids, index, axis=1), -1)
        padding = ((0, 0), (0, count - drawn.shape[1]))
        drawn = jnp.pad(drawn.astype(jnp.int32), padding, constant_values=-1)
        return Siblings(drawn, jnp.where(q > 0, ids, -1), q)

    def nothing() -> Siblings:
        shape = logits.shape[0], support
        return Siblings(jnp.full((shape[0], count), -1), jnp.full(shape, -1), jnp.zeros(shape))

    return when(parts.sampled, jnp.any(sampling.temperature > 0), sampled, nothing)
