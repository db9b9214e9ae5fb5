"""The one sampling law: logits and a request's settings to the distribution tokens are drawn from.

Order: banned ids and vocabulary padding, penalties, bias, temperature, top-k, top-p, min-p; each
filter acts on the renormalised result of the one before. A filter keeps every token at or above a
threshold probability, ties included, so that every backend finds the same set.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from ssd_jax.kernels.row_sum import row_sum
from ssd_jax.speculation.history import History, penalise
from ssd_jax.speculation.settings import Sampling

_ONE_BITS = 0x3F800000  # float32 1.0; non-negative floats order like their bit patterns


def allowed_logits(
    logits: jax.Array, sampling: Sampling, positions: jax.Array, history: History, tokens: int
) -> jax.Array:
    """Logits [B, V] float32 after everything that comes before the temperature.

    -inf at banned ids and at ids >= tokens (vocabulary padding); penalties and bias applied.
    """
    ids = jnp.arange(logits.shape[1])
    logits = jnp.where(ids < tokens, logits, -jnp.inf)
    banning = positions < sampling.ban_before

    def ban(logits: jax.Array) -> jax.Array:
        hit = jnp.any(ids[None, :, None] == sampling.banned[:, None, :], axis=-1)
        return jnp.where(hit & banning[:, None], -jnp.inf, logits)

    logits = jax.lax.cond(jnp.any(banning), ban, lambda logits: logits, logits)
    return penalise(logits, sampling, history)


def probs(
    logits: jax.Array, sampling: Sampling, positions: jax.Array, history: History, tokens: int
) -> jax.Array:
    """The distribution of the token at `positions` for each row.

    Args:
      logits: [B, V] float32, the model's.
      sampling: settings of the rows.
      positions: [B] int32, absolute position of the token to be drawn.
      history: tokens before it, those in flight included.
      tokens: how many ids exist; ids beyond are vocabulary padding.

    Returns: [B, V] float32; one-hot of the best token (lowest id on ties) for a greedy row.
    """
    allowed = allowed_logits(logits, sampling, positions, history, tokens)
    greedy = jax.nn.one_hot(jnp.argmax(allowed, axis=-1), logits.shape[1])
    return jnp.where(sampling.temperature[:, None] > 0, sampled_probs(allowed, sampling), greedy)


def sampled_probs(allowed: jax.Array, sampling: Sampling) -> jax.Array:
    """`probs` of sampled rows from allowed logits [B, V]; greedy rows get temperature 1."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1.0)
    # The maximum comes off first: at low temperatures the quotients themselves would overflow.
    below = allowed - jnp.max(allowed, axis=-1, keepdims=True)
    weights = jnp.exp(below / temperature[:, None])
    p = weights / row_sum(weights)
    top_k, top_p, min_p = sampling.top_k[:, None], sampling.top_p[:, None], sampling.min_p[:, None]
    p = _filter(p, top_k > 0, lambda p: _threshold(p, lambda kept: _count(kept) >= top_k))
    p = _filter(p, top_p < 1, lambda p: _threshold(p, lambda kept: row_sum(kept) >= top_p))
    return _filter(p, min_p > 0, lambda p: min_p * jnp.max(p, axis=-1, keepdims=True))


def _filter(
    p: jax.Array, applies: jax.Array, threshold: Callable[[jax.Array], jax.Array]
) -> jax.Array:
    """Keeps tokens with p >= threshold(p) and renormalises, in the rows [B, 1] where it applies."""

    def keep(p: jax.Array) -> jax.Array:
        # The likeliest token always stays, whatever rounding does to the threshold.
        low = jnp.minimum(threshold(p), jnp.max(p, axis=-1, keepdims=True))
        kept = jnp.where(p >= low, p, 0.0)
        kept = kept / row_sum(kept)
        return jnp.where(applies, kept, p)

    return jax.lax.cond(jnp.any(applies), keep, lambda p: p, p)


def _threshold(p: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The largest threshold [B, 1] whose kept set is enough (0 if none is), by bisection.

    Every float32 in [0, 1] is a candidate, so the set found is the smallest one closed under ties.
    """

    def halve(_: int, bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        value = jax.lax.bitcast_convert_type(middle, jnp.float32)
        ok = enough(jnp.where(p >= value, p, 0.0))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    low = jnp.zeros((p.shape[0], 1), jnp.int32)
    high = jnp.full((p.shape[0], 1), _ONE_BITS, jnp.int32)
    low, _ = jax.lax.fori_loop(0, 30, halve, (low, high))
    return jax.lax.bitcast_convert_type(low, jnp.float32)


def _count(kept: jax.Array) -> jax.Array:
    return jnp.sum(kept > 0, axis=-1, keepdims=True)
