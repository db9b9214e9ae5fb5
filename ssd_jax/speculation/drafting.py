"""Drawing proposed tokens from a draft's logits, with the exact q they are drawn from.

Order: draft logits, the request's own law (`probs`), the N likeliest of it, renormalise, draw. The
draw is made from the very numbers that are kept, so q is sparse and exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.kernels.rows import first_best, map_rows
from ssd_jax.speculation import keys
from ssd_jax.speculation.history import Heard
from ssd_jax.speculation.keys import Purpose
from ssd_jax.speculation.probs import allowed_logits, sampled_probs
from ssd_jax.speculation.settings import Sampling


class Draw(NamedTuple):
    """One proposed token a row.

    Attributes:
      token: [B] int32.
      support: [B, N] int32 ids, padded with -1.
      q: [B, N] float32 probabilities the token was drawn with; a point mass for greedy rows.
    """

    token: jax.Array
    support: jax.Array
    q: jax.Array


def draw(
    logits: jax.Array,
    sampling: Sampling,
    start: jax.Array,
    step: jax.Array,
    heard: Heard,
    *,
    tokens: int,
    support: int,
    rule: str = "ratio",
) -> Draw:
    """Draws the token that follows `step` proposed ones.

    Args:
      logits: [B, V] float32, the draft's.
      sampling: settings of the rows, with the draft's temperature; 0 proposes the likeliest token.
      start: [B] int32, position of the round's pending token.
      step: [] or [B] int32, tokens of this record drawn before.
      heard: gives what the draft knows to have been said [B, V], tokens in flight included. It may
        be wrong: that costs acceptance only.
      tokens: how many ids exist (see `probs`).
      support: N, most ids a proposal keeps; V keeps all.
      rule: "ratio" draws with keys of its own; "coupled" with the target's noise at the position.
    """
    step = jnp.broadcast_to(step, start.shape)
    position = start + 1 + step
    allowed = allowed_logits(logits, sampling, position, heard, tokens)
    best = first_best(allowed)
    first = jnp.arange(min(support, logits.shape[1])) == 0
    greedy = Draw(
        best,
        jnp.where(first, best[:, None], -1),
        jnp.broadcast_to(first.astype(jnp.float32), (best.shape[0], first.shape[0])),
    )

    def sampled() -> Draw:
        q, ids = _likeliest(map_rows(sampled_probs, allowed, sampling), first.shape[0])
        if rule == "coupled":
            at = (jnp.zeros_like(position), position, Purpose.TOKEN)
        else:
            at = (start, step, Purpose.DRAFT)
        noise = keys.gumbel_of(keys.derive(sampling.seed, sampling.request, *at), ids)
        chosen = jnp.argmax(jnp.log(q) + noise, axis=-1)[:, None]
        token = jnp.take_along_axis(ids, chosen, axis=-1)[:, 0].astype(jnp.int32)
        hot = sampling.temperature > 0
        return Draw(
            jnp.where(hot, token, greedy.token),
            jnp.where(hot[:, None], jnp.where(q > 0, ids, -1), greedy.support),
            jnp.where(hot[:, None], q, greedy.q),
        )

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


def _likeliest(p: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The `count` likeliest entries of p [B, V], renormalised, and their ids; [B, count] each."""
    if count == p.shape[1]:
        return p, jnp.broadcast_to(jnp.arange(count, dtype=jnp.int32), p.shape)
    q, ids = jax.lax.top_k(p, count)
    return q / jnp.sum(q, axis=-1, keepdims=True), ids
