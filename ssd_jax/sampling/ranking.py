"""The order in which a draft expects tokens at a position, for the nodes of a token tree.

Where a token is drawn with the noise of its absolute position, a draft ranks tokens by log q + that
noise, as the target does by log p + noise; greedy rows by q. The tree may have any shape, chosen
after seeing the ranks: the target's token does not depend on what is proposed.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.kernels.rows import top_k
from ssd_jax.sampling import keys
from ssd_jax.sampling.confidence_class import class_of_gap
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.outputs import Outputs, ids_of
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.probs import TopK, allowed_logits, likeliest_probs
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import ON_DEVICE, Parts, when


class Ranking(NamedTuple):
    """The likeliest continuations of B rows.

    Attributes:
      tokens: best first; -1 where no more are possible.
      gap_class: class of the gap between the best two scores; see `confidence.GAP_EDGES`.
    """

    tokens: Int32[Array, "B n"]
    gap_class: Int32[Array, "B"]


def rank(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    position: Int32[Array, "B"],
    get_history: GetHistory,
    *,
    tokens: int,
    count: int,
    support: int,
    outputs: Outputs = None,
    parts: Parts = ON_DEVICE,
) -> Ranking:
    """Ranks the continuations of each row.

    Args:
      logits: the draft's; V is N with `outputs`.
      sampling: settings of the rows, with the draft's temperature.
      position: absolute, of the token that the logits are for.
      get_history: returns the history of the rows, with the tokens in flight before it.
      tokens: number of ids that exist (see `probs`).
      count: n, number of continuations.
      support: number of likeliest tokens that noise ranks.
      outputs: ids of a reduced vocabulary.
      parts: of sampling, as far as they are known.
    """
    allowed = allowed_logits(
        logits, sampling, position, get_history, tokens, outputs, parts.adjusted
    )
    support = min(max(support, count, 2), logits.shape[1])
    largest = top_k(allowed, support)

    def ranking(scores: Float32[Array, "B n"], columns: Int32[Array, "B n"]) -> Ranking:
        best = jnp.where(scores > -jnp.inf, columns, -1)[:, :count]
        best = jnp.pad(best, ((0, 0), (0, count - best.shape[1])), constant_values=-1)
        return Ranking(ids_of(outputs, best), class_of_gap(scores))

    greedy = ranking(*largest)

    def sampled() -> Ranking:
        by_noise = ranking(*_perturbed(largest, allowed, sampling, position, outputs, parts))
        hot = sampling.temperature > 0
        return Ranking(
            jnp.where(hot[:, None], by_noise.tokens, greedy.tokens),
            jnp.where(hot, by_noise.gap_class, greedy.gap_class),
        )

    return when(parts.sampled, jnp.any(sampling.temperature > 0), sampled, lambda: greedy)


def _perturbed(
    largest: TopK,
    allowed: Float32[Array, "B V"],
    sampling: Sampling,
    position: Int32[Array, "B"],
    outputs: Outputs,
    parts: Parts,
) -> TopK:
    """log q + noise of the likeliest tokens, best first, and their columns."""
    support = largest[0].shape[1]
    q, columns = likeliest_probs(allowed, support, sampling, parts.truncated, largest)
    start = jnp.zeros_like(position)
    key = keys.derive(sampling.seed, sampling.request, start, position, Purpose.TOKEN)
    scores = jnp.log(q) + gumbel_of(key, ids_of(outputs, columns))
    order = jax.lax.top_k(scores, support)[1]
    return jnp.take_along_axis(scores, order, axis=1), jnp.take_along_axis(columns, order, axis=1)
