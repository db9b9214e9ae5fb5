"""Drawing a token from the target's distribution."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ssd_jax.speculation import keys
from ssd_jax.speculation.probs import Sampling, allowed_logits, sampled_probs


def sample(logits: jax.Array, sampling: Sampling, start: jax.Array, *, tokens: int) -> jax.Array:
    """Draws the token that follows the pending one: verification with nothing proposed.

    Args:
      logits: [B, V] float32 after the pending token.
      sampling: settings of the rows.
      start: [B] int32, position of the pending token; the token drawn has position start + 1.
      tokens: how many ids exist (see `probs`).

    Returns: [B] int32; argmax for greedy rows (lowest id on ties), else a Gumbel-max draw.
    """
    positions = start + 1
    allowed = allowed_logits(logits, sampling, positions, tokens)
    best = jnp.argmax(allowed, axis=-1).astype(jnp.int32)

    def draw() -> jax.Array:
        key = keys.derive(sampling.seed, sampling.request, start, positions, keys.Purpose.BONUS)
        noise = keys.gumbel(key, logits.shape[1])
        drawn = jnp.argmax(jnp.log(sampled_probs(allowed, sampling)) + noise, axis=-1)
        return jnp.where(sampling.temperature > 0, drawn.astype(jnp.int32), best)

    return jax.lax.cond(jnp.any(sampling.temperature > 0), draw, lambda: best)
