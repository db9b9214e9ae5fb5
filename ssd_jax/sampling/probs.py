"""Which tokens may be drawn, and the distribution of the likeliest ones, from logits and settings.

Grammars, banned ids, bad words, vocabulary padding, penalties and bias come before all that
`kernels/distribution.py` does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.distribution import truncate, weights_of
from ssd_jax.kernels.rows import row_sum, top_k
from ssd_jax.sampling import bad_words
from ssd_jax.sampling.masks import BITS
from ssd_jax.sampling.outputs import Outputs, every_id
from ssd_jax.sampling.penalties import GetHistory, penalise
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.variants import when

TopK = tuple[Float32[Array, "B n"], Int32[Array, "B n"]]
"""The largest values of each row, descending, and their columns."""


def allowed_logits(
    logits: Float32[Array, "B V"],
    sampling: Sampling,
    positions: Int32[Array, "B"],
    get_history: GetHistory,
    tokens: int,
    outputs: Outputs = None,
    adjusted: bool | None = None,
) -> Float32[Array, "B V"]:
    """Logits after everything that comes before the temperature.

    -inf at banned ids, at ids that complete a bad word, and at ids >= tokens (vocabulary padding);
    penalties and bias applied. With `outputs` the logits have columns for these ids only.
    `adjusted` is the field of `Parts`.
    """
    ids = every_id(outputs, logits.shape[1])
    if outputs is not None or tokens < logits.shape[1]:
        logits = jnp.where(ids < tokens, logits, -jnp.inf)
    ban_active = positions < sampling.ban_before

    def ban(logits: jax.Array) -> jax.Array:
        is_banned = jnp.any(ids[None, :, None] == sampling.banned[:, None, :], axis=-1)
        logits = jnp.where(is_banned & ban_active[:, None], -jnp.inf, logits)
        return bad_words.ban(logits, sampling, get_history(), outputs)

    any_banned = jnp.any(ban_active | bad_words.have_any(sampling))
    logits = when(adjusted, any_banned, ban, lambda logits: logits, logits)
    return penalise(logits, sampling, get_history, outputs, adjusted)


def only_allowed(
    logits: Float32[Array, "n V"], masks: Int32[Array, "n mask"]
) -> Float32[Array, "n V"]:
    """-inf at tokens that a grammar forbids: those whose bit is 0; see `masks`."""
    bits = (masks[:, :, None] >> jnp.arange(BITS)) & 1
    allowed = bits.reshape(masks.shape[0], -1)[:, : logits.shape[1]] == 1
    return jnp.where(allowed, logits, -jnp.inf)


def likeliest_probs(
    allowed: Float32[Array, "B V"],
    count: int,
    sampling: Sampling,
    truncated: bool | None = None,
    largest: TopK | None = None,
) -> tuple[Float32[Array, "B {count}"], Int32[Array, "B {count}"]]:
    """`sampled_probs` of the `count` likeliest tokens only, renormalised, and their ids.

    This needs no pass over all tokens for each filter. (A top-k beyond `count` does not affect what
    top-p keeps.) Probabilities are 0 where filtered out. `largest` holds at least the `count`
    largest logits, if they are known.
    """
    best, ids = (a[:, :count] for a in largest or top_k(allowed, count))
    top = best[:, :1]
    total = row_sum(weights_of(allowed, sampling, top))
    capped = sampling._replace(top_k=jnp.where(sampling.top_k > count, 0, sampling.top_k))
    p = truncate(weights_of(best, sampling, top) / total, capped, truncated)
    return p / row_sum(p), ids
