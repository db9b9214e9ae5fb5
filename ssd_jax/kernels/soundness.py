"""Whether logits give a distribution: no NaN, no +inf, and -inf for some tokens only."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.rows import argmax, max_and_argmax, row_max, row_sum


def sound(logits: Float32[Array, "n V"], tokens: int) -> Bool[Array, "n"]:
    """Whether each position is sound, by the ids that exist."""
    return (_total(logits, tokens) < jnp.inf) & _any_possible(logits, tokens)


def sound_of(
    checked: Bool[Array, "n"], logits: Float32[Array, "n V"], tokens: int
) -> Bool[Array, "n"]:
    """`sound` for the `checked` positions, one at a time; True for others, which are not read."""

    def check(index: jax.Array, is_checked: jax.Array) -> jax.Array:
        def check_row() -> jax.Array:
            row = jax.lax.dynamic_slice_in_dim(logits, index, 1)
            total = _total(row, tokens)[0]
            any_possible = jax.lax.cond(
                total > -jnp.inf, lambda: True, lambda: _any_possible(row, tokens)[0]
            )
            return any_possible & (total < jnp.inf)

        return jax.lax.cond(is_checked, check_row, lambda: True)

    return jax.lax.map(lambda arguments: check(*arguments), (jnp.arange(checked.size), checked))


def best_and_sound(
    allowed: Float32[Array, "n V"], logits: Float32[Array, "n V"], tokens: int
) -> tuple[Int32[Array, "n"], Bool[Array, "n"]]:
    """The best token of each position (any token where it is not sound), and `sound`.

    Args:
      allowed: the logits, -inf for ids that do not exist.
    """

    def in_two_passes(allowed: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
        return argmax(allowed), sound(logits, tokens)

    return jax.lax.platform_dependent(allowed, logits, tpu=_in_one_pass, default=in_two_passes)


def _in_one_pass(allowed: jax.Array, logits: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Both in one pass, as TPUs would read the logits twice: the largest value shows soundness."""
    del logits
    best, index = max_and_argmax(jnp.where(jnp.isnan(allowed), jnp.inf, allowed))
    return index, jnp.abs(best) < jnp.inf


def _total(logits: jax.Array, tokens: int) -> jax.Array:
    exists = jnp.arange(logits.shape[1]) < tokens
    return row_sum(jnp.where(exists, logits, 0.0))[:, 0]  # NaN and infinity survive the sum


def _any_possible(logits: jax.Array, tokens: int) -> jax.Array:
    exists = jnp.arange(logits.shape[1]) < tokens
    return row_max(jnp.where(exists, logits, -jnp.inf))[:, 0] > -jnp.inf
