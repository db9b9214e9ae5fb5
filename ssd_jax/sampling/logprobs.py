"""Log-probabilities of emitted tokens, the same numbers in every mode."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.rows import row_max, row_sum


class Logprobs(NamedTuple):
    """Log-probabilities of the emitted tokens, and of the likeliest at each, descending."""

    chosen: Float32[Array, "B W"]
    ids: Int32[Array, "B W count"]
    values: Float32[Array, "B W count"]


def log_softmax(logits: Float32[Array, "*rows V"]) -> Float32[Array, "*rows V"]:
    """Log-softmax over the last axis; each row's bits depend on that row alone."""
    shifted = logits - row_max(logits)
    return shifted - jnp.log(row_sum(jnp.exp(shifted)))


def logprobs(log_p: Float32[Array, "B W V"], emitted: Int32[Array, "B W"], count: int) -> Logprobs:
    """Looks up the emitted tokens and the `count` likeliest.

    `log_p` is the target's at each position, raw (log-softmax of its logits) or processed (log of
    `probs`), also for a bonus token that was drawn from a residual.
    """
    chosen = jnp.take_along_axis(log_p, emitted[:, :, None], axis=-1)[..., 0]
    values, ids = jax.lax.top_k(log_p, count)
    return Logprobs(chosen, ids.astype(jnp.int32), values)
