"""Log-probabilities of emitted tokens, under every mode the same numbers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from ssd_jax.kernels.row_sum import row_sum


class Logprobs(NamedTuple):
    """Attributes:
    chosen: [B, W] float32, of the emitted tokens.
    ids, values: [B, W, n] int32 and float32, the likeliest tokens, descending.
    """

    chosen: jax.Array
    ids: jax.Array
    values: jax.Array


def log_softmax(logits: jax.Array) -> jax.Array:
    """Over the last axis, [..., V] float32; each row's bits depend on that row alone."""
    below = logits - jnp.max(logits, axis=-1, keepdims=True)
    return below - jnp.log(row_sum(jnp.exp(below)))


def logprobs(law: jax.Array, emitted: jax.Array, count: int) -> Logprobs:
    """Looks up the emitted tokens [B, W] and the `count` likeliest in log-laws [B, W, V].

    `law` is the target's at each position, raw (log-softmax of its logits) or processed (log of
    `probs`). A bonus token that was drawn from a residual is reported under the same law.
    """
    chosen = jnp.take_along_axis(law, emitted[:, :, None], axis=-1)[..., 0]
    values, ids = jax.lax.top_k(law, count)
    return Logprobs(chosen, ids.astype(jnp.int32), values)
