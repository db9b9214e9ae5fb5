"""The search for the threshold of a filter, on a processor or wherever branches cost little."""

from __future__ import annotations

from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ssd_jax.kernels import truncation
from ssd_jax.kernels.rows import row_max, row_sum

_BLOCK = 128
_HEAD_BLOCKS = (
    64,
    256,
)  # numbers of blocks in which the likeliest tokens are searched, fewest first

Probs = Float32[Array, "B V"]


class Search(Protocol):
    """How thresholds are found; see `threshold`."""

    def __call__(
        self, p: Probs, least: Float32[Array, "B 1"], *, count: bool
    ) -> Float32[Array, "B 1"]:
        """The thresholds of all rows."""
        ...


def threshold(p: Probs, least: Float32[Array, "B 1"], *, count: bool) -> Float32[Array, "B 1"]:
    """The largest threshold whose kept set sums to `least`, or has as many tokens with `count`; 0
    if none does.

    It is first searched among the likeliest tokens: those in the blocks with the largest maxima.
    These hold the whole kept set if no other block reaches the threshold. A row for which that is
    so keeps its threshold when other rows are searched further, since other sums round differently.
    """

    def enough(values: jax.Array) -> jax.Array:
        return (truncation.count(values) if count else row_sum(values)) >= least

    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK))).reshape(p.shape[0], -1, _BLOCK)
    maxima = row_max(blocks)[..., 0]

    def search(heads: tuple[int, ...]) -> jax.Array:
        if not heads:
            return _bisect(p, enough)
        size, *larger = heads
        best, index = jax.lax.top_k(maxima, size + 1)
        head = jnp.take_along_axis(blocks, index[:, :size, None], axis=1).reshape(p.shape[0], -1)
        low = _bisect(head, enough)
        is_exact = low > best[:, size:]
        return jax.lax.cond(
            jnp.all(is_exact),
            lambda: low,
            lambda: jnp.where(is_exact, low, search(tuple(larger))),
        )

    return search(tuple(size for size in _HEAD_BLOCKS if 2 * size <= maxima.shape[1]))


def _bisect(p: Probs, enough: truncation.Enough) -> Float32[Array, "B 1"]:
    """`threshold` by bisection.

    Non-negative floats order like their bits, and every float32 is a candidate, so the set found is
    the smallest one closed under ties. A row whose likeliest token is enough needs no search.
    """

    def value(bits: jax.Array) -> jax.Array:
        return jax.lax.bitcast_convert_type(bits, jnp.float32)

    def halve(bounds: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = bounds
        middle = low + (high - low + 1) // 2
        ok = enough(jnp.where(p >= value(middle), p, 0.0))
        return jnp.where(ok, middle, low), jnp.where(ok, high, middle - 1)

    best = row_max(p)
    high = jax.lax.bitcast_convert_type(best, jnp.int32)
    low = jnp.where(enough(jnp.where(p >= best, p, 0.0)), high, 0)
    low, _ = jax.lax.while_loop(lambda bounds: jnp.any(bounds[0] < bounds[1]), halve, (low, high))
    return value(low)
