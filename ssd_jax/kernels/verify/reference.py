"""`verify` written for reading: every distribution written out, thresholds found by sorting."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32

from ssd_jax.kernels.distribution import DrawSettings
from ssd_jax.kernels.noise import Key, gumbel_of
from ssd_jax.kernels.sparse import dense_by_scatter
from ssd_jax.kernels.verify.positions import (
    NO_TOKEN,
    Judges,
    Law,
    Outcome,
    Positions,
    Residual,
    SamplingParts,
    TargetProbs,
)


def verify_reference(
    positions: Positions, law: Law, judges: Judges, parts: SamplingParts, tokens: int
) -> tuple[Outcome, Bool[Array, "n"]]:
    """The outcome, and the soundness of all positions; see `api.verify`."""
    del parts
    allowed = law.allowed(positions)

    def probs_at(block: Positions) -> jax.Array:
        return sampled_probs_reference(law.allowed(block), law.settings(block))

    def prob_of() -> jax.Array:
        return jnp.take_along_axis(probs_at(positions), positions.follower[:, None], axis=1)[:, 0]

    def draw(block: Positions, key: Key, residual: Residual | None = None) -> jax.Array:
        p = weights = probs_at(block)
        if residual is not None:
            scale = 1.0 if residual.scale is None else residual.scale[:, None]
            q = dense_by_scatter(residual.support, residual.q, vocab=p.shape[1])
            left = jnp.maximum(scale * p - q, 0.0)
            empty = ~jnp.any(left > 0, axis=1, keepdims=True)
            weights = jnp.where(~residual.applies[:, None] | empty, p, left)
        noise = gumbel_of(key, jnp.arange(p.shape[1])[None])
        drawn = jnp.argmax(jnp.log(weights) + noise, axis=1).astype(jnp.int32)
        return jnp.where(jnp.any(p > 0, axis=1), drawn, NO_TOKEN)

    target = TargetProbs(probs_at, prob_of, draw, uses_cond=False)
    greedy = judges.greedy(jnp.argmax(allowed, axis=1).astype(jnp.int32))
    sampled = judges.sampled(target, positions)
    outcome = jax.tree.map(
        lambda drawn, best: jnp.where(judges.is_sampled, drawn, best), sampled, greedy
    )
    exists = positions.logits[:, :tokens]
    numbers = ~jnp.any(jnp.isnan(exists) | (exists == jnp.inf), axis=1)
    possible = jnp.any(exists > -jnp.inf, axis=1) & jnp.any(allowed > -jnp.inf, axis=1)
    return outcome, numbers & possible


def sampled_probs_reference(
    allowed: Float32[Array, "n V"], settings: DrawSettings
) -> Float32[Array, "n V"]:
    """`distribution.sampled_probs`."""
    temperature = jnp.where(settings.temperature > 0, settings.temperature, 1.0)[:, None]
    best = jnp.max(allowed, axis=1, keepdims=True)
    p = jax.nn.softmax((allowed - best) / temperature, axis=1)
    ordered = jnp.sort(p, axis=1, descending=True)
    last = jnp.clip(settings.top_k, 1, p.shape[1])[:, None] - 1
    least = jnp.take_along_axis(ordered, last, axis=1)
    p = _filter(p, settings.top_k > 0, least)
    ordered = jnp.sort(p, axis=1, descending=True)
    mass = jnp.cumsum(ordered, axis=1)
    # A sum that rounding keeps below top_p never reaches it: then all tokens stay.
    last = jnp.argmax(mass >= settings.top_p[:, None], axis=1, keepdims=True)
    least = jnp.where(mass[:, -1:] >= settings.top_p[:, None], ordered, 0.0)
    p = _filter(p, settings.top_p < 1, jnp.take_along_axis(least, last, axis=1))
    return _filter(p, settings.min_p > 0, settings.min_p[:, None] * jnp.max(p, 1, keepdims=True))


def _filter(p: jax.Array, applies: jax.Array, threshold: jax.Array) -> jax.Array:
    p_above = jnp.where(p >= jnp.minimum(threshold, jnp.max(p, axis=1, keepdims=True)), p, 0.0)
    return jnp.where(applies[:, None], p_above / jnp.sum(p_above, axis=1, keepdims=True), p)
