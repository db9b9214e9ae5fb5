"""The distribution that tokens are drawn from, computed from allowed logits.

Order: temperature, top-k, top-p, min-p; each filter acts on the renormalised result of the one
before. A filter keeps every token at or above a threshold probability, ties included, so that every
backend finds the same set.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from ssd_jax.kernels import truncation
from ssd_jax.kernels.rows import argmax, row_max, row_sum
from ssd_jax.kernels.truncation import Filters

_BLOCK = 128
_HEAD_BLOCKS = (
    64,
    256,
)  # numbers of blocks in which the likeliest tokens are searched, fewest first

Probs = Float32[Array, "B V"]
Threshold = Callable[[jax.Array], jax.Array]
"""Returns the least probability that stays, [B, 1]."""


class DrawSettings(Filters, Protocol):
    """What the distributions of B rows depend on besides logits."""

    @property
    def temperature(self) -> Float32[Array, "B"]:
        """0 is greedy."""
        ...


def probs(
    allowed: Float32[Array, "B V"], settings: DrawSettings, truncated: bool | None = None
) -> Probs:
    """The distributions that tokens are drawn from, given allowed logits.

    A greedy row is one-hot at the best token, the lowest id on ties.
    """
    greedy = jax.nn.one_hot(argmax(allowed), allowed.shape[1])
    sampled = sampled_probs(allowed, settings, truncated)
    return jnp.where(settings.temperature[:, None] > 0, sampled, greedy)


def sampled_probs(
    allowed: Float32[Array, "B V"], settings: DrawSettings, truncated: bool | None = None
) -> Probs:
    """`probs` of sampled rows; greedy rows get temperature 1.

    `truncated` is the field of `Parts`: if False, no row may have a filter.
    """
    weights = weights_of(allowed, settings, row_max(allowed))
    return truncate(weights / row_sum(weights), settings, truncated)


def weights_of(
    allowed: Float32[Array, "B n"], settings: DrawSettings, top: Float32[Array, "B 1"]
) -> Float32[Array, "B n"]:
    """`sampled_probs` before truncation, not normalised, for any tokens of the rows.

    `top` is the largest allowed logit of each row.
    """
    # The maximum is subtracted first: at low temperatures the quotients themselves would overflow.
    return jnp.exp((allowed - top) / temperature_of(settings)[:, None])


def temperature_of(settings: DrawSettings) -> Float32[Array, "B"]:
    """The temperatures, 1 for greedy rows."""
    return jnp.where(settings.temperature > 0, settings.temperature, 1.0)


def truncate(p: Probs, settings: DrawSettings, truncated: bool | None = None) -> Probs:
    """p after top-k, top-p and min-p; a filter that asks for more than all of p keeps all."""
    if truncated is not None:
        return truncation.apply(p, truncation.cut(p, settings)) if truncated else p
    top_k, top_p, min_p = settings.top_k[:, None], settings.top_p[:, None], settings.min_p[:, None]
    p = _filter(p, top_k > 0, lambda p: _threshold(p, lambda kept: truncation.count(kept) >= top_k))
    p = _filter(p, top_p < 1, lambda p: _threshold(p, lambda kept: row_sum(kept) >= top_p))
    return _filter(p, min_p > 0, lambda p: min_p * row_max(p))


def _filter(p: Probs, applies: Bool[Array, "B 1"], threshold: Threshold) -> Probs:
    """Keeps tokens with p >= threshold(p) and renormalises, in the rows where it applies."""

    def keep(p: jax.Array) -> jax.Array:
        # The likeliest token always stays, whatever rounding does to the threshold.
        low = jnp.minimum(threshold(p), row_max(p))
        kept = jnp.where(p >= low, p, 0.0)
        kept = kept / row_sum(kept)
        return jnp.where(applies, kept, p)

    return jax.lax.cond(jnp.any(applies), keep, lambda p: p, p)


def _threshold(p: Probs, enough: truncation.Enough) -> Float32[Array, "B 1"]:
    """The largest threshold whose kept set is enough (0 if none is).

    It is first searched among the likeliest tokens: those in the blocks with the largest maxima.
    These hold the whole kept set if no other block reaches the threshold. A row for which that is
    so keeps its threshold when other rows are searched further, since other sums round differently.
    """
    blocks = jnp.pad(p, ((0, 0), (0, -p.shape[1] % _BLOCK))).reshape(p.shape[0], -1, _BLOCK)
    maxima = row_max(blocks)[..., 0]

    def search(heads: tuple[int, ...]) -> jax.Array:
        if not heads:
            return _bisect(p, enough)
        size, *larger = heads
        best, index = jax.lax.top_k(maxima, size + 1)
        head = jnp.take_along_axis(blocks, index[:, :size, None], axis=1).reshape(p.shape[0], -1)
        threshold = _bisect(head, enough)
        is_exact = threshold > best[:, size:]
        return jax.lax.cond(
            jnp.all(is_exact),
            lambda: threshold,
            lambda: jnp.where(is_exact, threshold, search(tuple(larger))),
        )

    return search(tuple(size for size in _HEAD_BLOCKS if 2 * size <= maxima.shape[1]))


def _bisect(p: Probs, enough: truncation.Enough) -> Float32[Array, "B 1"]:
    """`_threshold` by bisection.

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
