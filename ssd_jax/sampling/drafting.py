"""Draws proposed tokens from a draft's logits, with the exact q they are drawn from.

Order: draft logits, the request's own distribution (`probs`), its N likeliest tokens, renormalise,
Saguaro sampling, renormalise, draw. The draw uses the same numbers that are kept, so q is sparse
and exact.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.distribution import sampled_probs
from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.kernels.rows import argmax, map_rows, row_max, row_sum, top_k
from ssd_jax.sampling import keys
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.confidence_class import class_of_probability, class_of_shared_noise
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.outputs import Outputs, every_id, ids_of
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.probs import TopK, allowed_logits, likeliest_probs
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.saguaro import lower
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import ON_DEVICE, Parts, when


class Draw(NamedTuple):
    """One proposed token a row."""

    token: Int32[Array, "B"]
    support: Int32[Array, "B N"]  # ids, padded with -1
    q: Float32[Array, "B N"]  # that the token was drawn with; a point mass for greedy rows
    candidates: Int32[Array, "B W"]  # the likeliest tokens before Saguaro sampling, for branches
    confidence: Int32[Array, "B"]  # class of the draft's confidence in it; see `confidence`


class Saguaro(NamedTuple):
    """Saguaro sampling of a draw; see `saguaro.lower`."""

    c: float | Float32[Array, ""]
    lowered: Int32[Array, "..."]  # D, one or one a row: tokens planned to get a branch, plus one


def draw(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    start: Int32[Array, "B"],
    step: Int32[Array, "..."],
    get_history: GetHistory,
    *,
    tokens: int,
    support: int,
    rule: str = "ratio",
    candidates: int = 0,
    saguaro: Saguaro | None = None,
    confident: bool = False,
    outputs: Outputs = None,
    parts: Parts = ON_DEVICE,
) -> Draw:
    """Draws the token that follows `step` proposed tokens.

    Args:
      logits: the draft's; V is N with `outputs`.
      sampling: settings of the rows, with the draft's temperature; 0 proposes the likeliest token.
      start: position of the round's pending token.
      step: number of tokens of this record drawn before, one for all rows or one a row.
      get_history: returns the history as the draft knows it, for the tokens of the logits,
        including those in flight. It may be wrong, which costs acceptance only.
      tokens: number of ids that exist (see `probs`).
      support: N, most ids that a proposal keeps; V keeps all.
      rule: of the verification; it says whether the target's noise at the position draws.
      candidates: W, number of likeliest tokens to report.
      saguaro: for sampled rows; None leaves q alone.
      confident: whether to report the draft's confidence in the token, from its probability before
        Saguaro sampling, in greedy rows at temperature 1.
      outputs: ids of a reduced vocabulary. Where all of them are banned, the row proposes the
        first as a point mass; it will be rejected.
      parts: of sampling, as far as they are known.
    """
    step = jnp.broadcast_to(step, start.shape)
    position = start + 1 + step
    allowed = allowed_logits(
        logits, sampling, position, get_history, tokens, outputs, parts.adjusted
    )
    support = min(support, logits.shape[1])
    # Where sampled rows are always computed, one search serves both.
    shared_search = parts.sampled and support < logits.shape[1]
    largest = top_k(allowed, max(support, candidates)) if shared_search else None
    likeliest = _candidates(allowed, candidates, outputs, largest)
    # A valid id even where the logits are no numbers.
    best = jnp.maximum(likeliest[:, 0], 0) if candidates else ids_of(outputs, argmax(allowed))
    any_allowed: jax.Array | None = None
    if outputs is not None:
        any_allowed = row_max(allowed)[:, 0] > -jnp.inf
        best = jnp.where(any_allowed, best, outputs[0])
    is_first = jnp.arange(support) == 0
    greedy = Draw(
        best,
        jnp.where(is_first, best[:, None], -1),
        jnp.broadcast_to(is_first.astype(jnp.float32), (best.shape[0], support)),
        likeliest,
        _greedy_confidence(allowed) if confident else jnp.full_like(best, UNKNOWN),
    )

    def sampled() -> Draw:
        q, ids = sparse_probs(allowed, support, sampling, outputs, parts, largest)
        q_before = q
        if saguaro is not None:
            q = lower(q, ids, likeliest, saguaro.lowered, saguaro.c)
        if RULES[rule].keyed_by_position:
            counter = (jnp.zeros_like(position), position, Purpose.TOKEN)
        else:
            counter = (start, step, Purpose.DRAFT)
        noise = gumbel_of(keys.derive(sampling.seed, sampling.request, *counter), ids)
        scores = jnp.log(q) + noise
        index = jnp.argmax(scores, axis=-1)[:, None]
        token = jnp.take_along_axis(ids, index, axis=-1)[:, 0].astype(jnp.int32)
        is_sampled = sampling.temperature > 0
        if any_allowed is not None:
            is_sampled = is_sampled & any_allowed
        confidence = greedy.confidence
        if confident:
            probability = jnp.take_along_axis(q_before, index, axis=-1)[:, 0]
            sure = (
                class_of_shared_noise(top_k(scores, min(2, support))[0], probability)
                if RULES[rule].keyed_by_position
                else class_of_probability(probability)
            )
            confidence = jnp.where(is_sampled, sure, confidence)
        return Draw(
            jnp.where(is_sampled, token, greedy.token),
            jnp.where(is_sampled[:, None], jnp.where(q > 0, ids, -1), greedy.support),
            jnp.where(is_sampled[:, None], q, greedy.q),
            likeliest,
            confidence,
        )

    return when(parts.sampled, jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


def sparse_probs(
    allowed: Float32[Array, "B V"],
    support: int,
    sampling: Sampling,
    outputs: Outputs,
    parts: Parts,
    largest: TopK | None = None,
) -> tuple[Float32[Array, "B n"], Int32[Array, "B n"]]:
    """q of sampled rows, before Saguaro sampling, and its ids; arguments as in `draw`.

    Args:
      allowed: the draft's logits, with bans, penalties and bias.
      largest: at least the N largest of them, if they are known.
    """
    if support == allowed.shape[1]:
        q = map_rows(
            lambda x, settings: sampled_probs(x, settings, parts.truncated), allowed, sampling
        )
        return q, jnp.broadcast_to(every_id(outputs, support), q.shape)
    q, columns = likeliest_probs(allowed, support, sampling, parts.truncated, largest)
    return q, ids_of(outputs, columns)


def candidates(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    position: Int32[Array, "B"],
    get_history: GetHistory,
    *,
    tokens: int,
    count: int,
    outputs: Outputs = None,
    adjusted: bool | None = None,
) -> Int32[Array, "B {count}"]:
    """The likeliest tokens at a position; -1 where no more are allowed. Arguments as in `draw`."""
    allowed = allowed_logits(logits, sampling, position, get_history, tokens, outputs, adjusted)
    return _candidates(allowed, count, outputs)


def _greedy_confidence(allowed: Float32[Array, "B V"]) -> Int32[Array, "B"]:
    best = row_max(allowed)
    return class_of_probability(1 / row_sum(jnp.exp(allowed - best))[:, 0])


def _candidates(
    allowed: Float32[Array, "B V"], count: int, outputs: Outputs, largest: TopK | None = None
) -> Int32[Array, "B {count}"]:
    values, columns = (a[:, :count] for a in largest or top_k(allowed, count))
    return ids_of(outputs, jnp.where(values > -jnp.inf, columns, -1))
