"""Top-k, top-p and min-p of all rows at once, in a fixed number of steps.

For accelerators, where a loop of unknown length or a branch would stop the host. The kept sets are
those of `distribution.py`: each filter keeps every token at or above the largest threshold that
keeps enough. Two numbers a row describe the effect of all filters, so no truncated row need be
written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.rows import row_sum

_BITS = 30  # of a float32 in [0, 2), as an integer
_DIGIT = 3  # bits found in one pass over the rows; passes and thresholds a pass then cost alike

Enough = Callable[[Float32[Array, "n V"]], Bool[Array, "n 1"]]
"""Whether the values above a threshold, zero elsewhere, are enough: else fewer are not either."""


class Filters(Protocol):
    """What tokens of n rows may be drawn."""

    @property
    def top_k(self) -> Int32[Array, "n"]:
        """0 is off."""
        ...

    @property
    def top_p(self) -> Float32[Array, "n"]:
        """1 is off."""
        ...

    @property
    def min_p(self) -> Float32[Array, "n"]:
        """0 is off."""
        ...


class Cut(NamedTuple):
    """Tokens below `low` are dropped, the others are multiplied by `scale`."""

    low: Float32[Array, "n 1"]
    scale: Float32[Array, "n 1"]


def apply(p: Float32[Array, "n V"], cut: Cut) -> Float32[Array, "n V"]:
    """p after the rows' cut, for any tokens of the rows."""
    return jnp.where(p >= cut.low, p, 0.0) * cut.scale


def cut(p: Float32[Array, "n V"], filters: Filters) -> Cut:
    """The effect of top-k, top-p and min-p on the rows of p, each on the result of the one before.

    Renormalising scales the rest of a row by one factor, so each threshold is one of p itself.
    """
    top_k, top_p, min_p = filters.top_k[:, None], filters.top_p[:, None], filters.min_p[:, None]
    low = jnp.where(top_k > 0, _largest_threshold(p, lambda values: count(values) >= top_k), 0.0)
    mass = top_p * jnp.where(top_k > 0, _mass(p, low), 1.0)
    threshold = _largest_threshold(p, lambda values: row_sum(values) >= mass)
    low = jnp.where(top_p < 1, jnp.maximum(low, threshold), low)
    best = jnp.max(p, axis=-1, keepdims=True)
    low = jnp.maximum(low, min_p * best)
    # The likeliest token always stays, whatever rounding does to the threshold.
    low = jnp.minimum(low, best)
    applies = (top_k > 0) | (top_p < 1) | (min_p > 0)
    # The barrier keeps either number from being computed twice.
    return Cut(*jax.lax.optimization_barrier((low, jnp.where(applies, 1 / _mass(p, low), 1.0))))


def _largest_threshold(p: Float32[Array, "n V"], enough: Enough) -> Float32[Array, "n 1"]:
    """The largest threshold whose kept set is enough (0 if none is), digit by digit of its bits.

    Non-negative floats order like their bits, and every float32 is a candidate, so the set found is
    the smallest one closed under ties.
    """

    def find_digit(index: jax.Array, bits: jax.Array) -> jax.Array:
        shift = _BITS - _DIGIT * (index + 1)

        def reached(digit: int) -> jax.Array:
            low = jax.lax.bitcast_convert_type(bits | (digit << shift), jnp.float32)
            return enough(jnp.where(p >= low, p, 0.0)).astype(jnp.int32)

        return bits | (sum(map(reached, range(1, 2**_DIGIT))) << shift)

    bits = jax.lax.fori_loop(0, _BITS // _DIGIT, find_digit, jnp.zeros((p.shape[0], 1), jnp.int32))
    return jax.lax.bitcast_convert_type(bits, jnp.float32)


def _mass(p: Float32[Array, "n V"], low: Float32[Array, "n 1"]) -> Float32[Array, "n 1"]:
    return row_sum(jnp.where(p >= low, p, 0.0))


def count(values: Float32[Array, "n V"]) -> Int32[Array, "n 1"]:
    """Number of positive values of each row."""
    return jnp.sum(values > 0, axis=-1, keepdims=True, dtype=jnp.int32)
