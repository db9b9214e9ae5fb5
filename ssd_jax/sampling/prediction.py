"""Noise-aware prediction: the bonus tokens that a verification is likely to draw, given its noise.

Draws are functions of known keys, so the draft can compute the noise that will draw the bonus token
of a round, and rank candidates by log q + noise. That is exact: this noise then only decides which
outcomes are prepared. Accept draws, the draws of branches and the noise of the next round have
other keys.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.distribution import sampled_probs
from ssd_jax.kernels.noise import gumbel_of
from ssd_jax.kernels.rows import map_rows, row_max, top_k
from ssd_jax.sampling import keys
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.outputs import Outputs, every_id, ids_of
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.probs import allowed_logits
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import ON_DEVICE, Parts

_IMPOSSIBLE = -200.0  # below log p + noise of any token that may be drawn


def predict_bonus(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    start: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    get_history: GetHistory,
    *,
    tokens: int,
    count: int,
    rule: str,
    outputs: Outputs = None,
    parts: Parts = ON_DEVICE,
) -> Int32[Array, "B {count}"]:
    """Bonus tokens that a verification's noise would draw from the draft's distribution, in order.

    The whole distribution is used: where the draft's token was rejected, much of the residual lies
    on tokens that the draft's truncated proposals never contain.

    Args:
      logits: the draft's; V is N with `outputs`, and no other token is foreseen.
      sampling: settings of the rows; greedy ones get temperature 1.
      start: position of the pending token of the round that draws the bonus token.
      accepted: number of tokens accepted in that round before the bonus token.
      get_history: returns the history of the rows, for the tokens of the logits, with accepted
        tokens.
      tokens: number of ids that exist (see `probs`).
      count: W, number of candidates.
      rule: of the verification, a name of `RULES`.
      parts: of sampling, as far as they are known.

    Returns: the tokens; those without probability come last, the likeliest of them first; -1 where
    no more are allowed.
    """
    position = start + 1 + accepted
    allowed = allowed_logits(
        logits, sampling, position, get_history, tokens, outputs, parts.adjusted
    )
    if RULES[rule].keyed_by_position:
        counter = (jnp.zeros_like(position), position, Purpose.TOKEN)
    else:
        counter = (start, position, Purpose.BONUS)
    key = keys.derive(sampling.seed, sampling.request, *counter)

    def rank(allowed: jax.Array, sampling: Sampling, key: keys.Key) -> jax.Array:
        p = sampled_probs(allowed, sampling, parts.truncated)
        perturbed = jnp.log(p) + gumbel_of(key, every_id(outputs, allowed.shape[1])[None])
        impossible = _IMPOSSIBLE + allowed - row_max(allowed)
        scores, columns = top_k(jnp.where(p > 0, perturbed, impossible), count)
        return ids_of(outputs, jnp.where(scores > -jnp.inf, columns, -1))

    return map_rows(rank, allowed, sampling, key)
