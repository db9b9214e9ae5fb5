"""Drawing proposed tokens from a draft's logits, with the exact q they are drawn from.

Order: draft logits, the request's own law (`probs`), the N likeliest of it, renormalise, Saguaro
sampling, renormalise, draw. The draw is made from the very numbers that are kept, so q is sparse
and exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.kernels.row_sum import row_sum
from ssd_jax.kernels.rows import first_best, largest, map_rows
from ssd_jax.sampling import keys
from ssd_jax.sampling.confidence import EDGES, UNKNOWN
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.outputs import Outputs, every_id, ids_of
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.probs import allowed_logits, likeliest_probs, sampled_probs
from ssd_jax.sampling.saguaro import lower
from ssd_jax.sampling.settings import Sampling


class Draw(NamedTuple):
    """One proposed token a row.

    Attributes:
      token: [B] int32.
      support: [B, N] int32 ids, padded with -1.
      q: [B, N] float32 probabilities the token was drawn with; a point mass for greedy rows.
      candidates: [B, W] int32, the likeliest tokens before Saguaro sampling, for branches.
      confidence: [B] int32, class of the draft's probability of the token (`confidence.EDGES`).
    """

    token: jax.Array
    support: jax.Array
    q: jax.Array
    candidates: jax.Array
    confidence: jax.Array


class Saguaro(NamedTuple):
    """Saguaro sampling of a draw; see `saguaro.lower`.

    Attributes:
      c: C.
      lowered: [] or [B] int32, D: tokens that are planned to get a branch, and one more.
    """

    c: float
    lowered: jax.Array


def draw(
    logits: jax.Array,
    sampling: Sampling,
    start: jax.Array,
    step: jax.Array,
    get_history: GetHistory,
    *,
    tokens: int,
    support: int,
    rule: str = "ratio",
    candidates: int = 0,
    saguaro: Saguaro | None = None,
    confident: bool = False,
    outputs: Outputs = None,
) -> Draw:
    """Draws the token that follows `step` proposed ones.

    Args:
      logits: [B, V] float32, the draft's; [B, N] of one with a reduced vocabulary.
      sampling: settings of the rows, with the draft's temperature; 0 proposes the likeliest token.
      start: [B] int32, position of the round's pending token.
      step: [] or [B] int32, tokens of this record drawn before.
      get_history: gives what the draft knows of the history, of the tokens of the logits, those
        in flight included. It may be wrong: that costs acceptance only.
      tokens: how many ids exist (see `probs`).
      support: N, most ids a proposal keeps; V keeps all.
      rule: "ratio" draws with keys of its own; "coupled" with the target's noise at the position.
      candidates: W, how many of the likeliest tokens to report.
      saguaro: of sampled rows; None leaves q alone.
      confident: whether to report the draft's probability of the token: of its law before Saguaro
        sampling, in greedy rows at temperature 1.
      outputs: [N] int32 ids of a reduced vocabulary, ascending. Where all of them are banned, the
        row proposes the first as a point mass; it will be rejected.
    """
    step = jnp.broadcast_to(step, start.shape)
    position = start + 1 + step
    allowed = allowed_logits(logits, sampling, position, get_history, tokens, outputs)
    likeliest = _candidates(allowed, candidates, outputs)
    best = likeliest[:, 0] if candidates else ids_of(outputs, first_best(allowed))
    possible = None
    if outputs is not None:
        possible = jnp.max(allowed, axis=-1) > -jnp.inf
        best = jnp.where(possible, best, outputs[0])
    support = min(support, logits.shape[1])
    first = jnp.arange(support) == 0
    greedy = Draw(
        best,
        jnp.where(first, best[:, None], -1),
        jnp.broadcast_to(first.astype(jnp.float32), (best.shape[0], support)),
        likeliest,
        _greedy_confidence(allowed) if confident else jnp.full_like(best, UNKNOWN),
    )

    def sampled() -> Draw:
        if support == logits.shape[1]:
            q = map_rows(sampled_probs, allowed, sampling)
            ids = jnp.broadcast_to(every_id(outputs, support), q.shape)
        else:
            q, ids = likeliest_probs(allowed, support, sampling)
            ids = ids_of(outputs, ids)
        before = q
        if saguaro is not None:
            q = lower(q, ids, likeliest, saguaro.lowered, saguaro.c)
        if rule == "coupled":
            at = (jnp.zeros_like(position), position, Purpose.TOKEN)
        else:
            at = (start, step, Purpose.DRAFT)
        noise = keys.gumbel_of(keys.derive(sampling.seed, sampling.request, *at), ids)
        chosen = jnp.argmax(jnp.log(q) + noise, axis=-1)[:, None]
        token = jnp.take_along_axis(ids, chosen, axis=-1)[:, 0].astype(jnp.int32)
        hot = sampling.temperature > 0
        if possible is not None:
            hot = hot & possible
        told = greedy.confidence
        if confident:
            told = jnp.where(hot, _class(jnp.take_along_axis(before, chosen, axis=-1)[:, 0]), told)
        return Draw(
            jnp.where(hot, token, greedy.token),
            jnp.where(hot[:, None], jnp.where(q > 0, ids, -1), greedy.support),
            jnp.where(hot[:, None], q, greedy.q),
            likeliest,
            told,
        )

    return jax.lax.cond(jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


def candidates(
    logits: jax.Array,
    sampling: Sampling,
    position: jax.Array,
    get_history: GetHistory,
    *,
    tokens: int,
    count: int,
    outputs: Outputs = None,
) -> jax.Array:
    """The likeliest tokens at a `position` [B], [B, count] int32; -1 where no more are allowed.

    Other arguments as `draw`.
    """
    allowed = allowed_logits(logits, sampling, position, get_history, tokens, outputs)
    return _candidates(allowed, count, outputs)


def _greedy_confidence(allowed: jax.Array) -> jax.Array:
    best = jnp.max(allowed, axis=-1, keepdims=True)
    return _class(1 / row_sum(jnp.exp(allowed - best))[:, 0])


def _class(probability: jax.Array) -> jax.Array:
    return jnp.sum(probability[:, None] >= jnp.array(EDGES), axis=-1, dtype=jnp.int32)


def _candidates(allowed: jax.Array, count: int, outputs: Outputs) -> jax.Array:
    values, columns = largest(allowed, count)
    return ids_of(outputs, jnp.where(values > -jnp.inf, columns, -1))
