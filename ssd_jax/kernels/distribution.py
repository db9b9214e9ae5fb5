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
from ssd_jax.kernels.threshold import Probs, Search, threshold
from ssd_jax.kernels.truncation import Filters

Threshold = Callable[[jax.Array], jax.Array]
"""Returns the least probability that stays, [B, 1]."""


class DrawSettings(Filters, Protocol):
    """What the distributions of B rows depend on besides logits."""

    @property
    def temperature(self) -> Float32[Array, "B"]:
        """0 is greedy."""
        ...


def probs(
    allowed: Float32[Array, "B V"],
    settings: DrawSettings,
    truncated: bool | None = None,
    search: Search = threshold,
) -> Probs:
    """The distributions that tokens are drawn from, given allowed logits.

    A greedy row is one-hot at the best token, the lowest id on ties.
    """
    greedy = jax.nn.one_hot(argmax(allowed), allowed.shape[1])
    sampled = sampled_probs(allowed, settings, truncated, search)
    return jnp.where(settings.temperature[:, None] > 0, sampled, greedy)


def sampled_probs(
    allowed: Float32[Array, "B V"],
    settings: DrawSettings,
    truncated: bool | None = None,
    search: Search = threshold,
) -> Probs:
    """`probs` of sampled rows; greedy rows get temperature 1.

    `truncated` is the field of `Parts`: if False, no row may have a filter.
    """
    weights = weights_of(allowed, settings, row_max(allowed))
    return truncate(weights / row_sum(weights), settings, truncated, search)


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


def truncate(
    p: Probs,
    settings: DrawSettings,
    truncated: bool | None = None,
    search: Search = threshold,
) -> Probs:
    """p after top-k, top-p and min-p; a filter that asks for more than all of p keeps all."""
    if truncated is not None:
        return truncation.apply(p, truncation.cut(p, settings)) if truncated else p
    top_k, top_p, min_p = settings.top_k[:, None], settings.top_p[:, None], settings.min_p[:, None]
    p = _filter(p, top_k > 0, lambda p: search(p, top_k.astype(jnp.float32), count=True))
    p = _filter(p, top_p < 1, lambda p: search(p, top_p, count=False))
    return _filter(p, min_p > 0, lambda p: min_p * row_max(p))


def _filter(p: Probs, applies: Bool[Array, "B 1"], find: Threshold) -> Probs:
    """Keeps tokens with p >= find(p) and renormalises, in the rows where it applies."""

    def keep(p: jax.Array) -> jax.Array:
        # The likeliest token always stays, whatever rounding does to the threshold.
        low = jnp.minimum(find(p), row_max(p))
        p_above = jnp.where(p >= low, p, 0.0)
        return jnp.where(applies, p_above / row_sum(p_above), p)

    return jax.lax.cond(jnp.any(applies), keep, lambda p: p, p)
