"""Verification in plain XLA: `decided` on the device, position by position, or all `at_once`."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels import soundness, truncation
from ssd_jax.kernels.distribution import (
    DrawSettings,
    probs,
    sampled_probs,
    temperature_of,
    weights_of,
)
from ssd_jax.kernels.noise import Key, gumbel_max
from ssd_jax.kernels.rows import best_and_mass, map_rows, max_and_argmax, row_max
from ssd_jax.kernels.sparse import dense
from ssd_jax.kernels.threshold import Search, threshold
from ssd_jax.kernels.verify.positions import (
    NO_TOKEN,
    Draw,
    Judges,
    Law,
    Normalisation,
    Outcome,
    Positions,
    Residual,
    SamplingParts,
    TargetProbs,
    no_token_where_zero,
)


def decided(
    positions: Positions,
    law: Law,
    judges: Judges,
    parts: SamplingParts,
    tokens: int,
    search: Search = threshold,
) -> tuple[Outcome, Bool[Array, "n"]]:
    """The outcome, and the soundness of positions on its path; see `api.verify`.

    The device decides which parts of sampling are computed.

    Args:
      search: for thresholds.
    """
    is_sampled = judges.is_sampled

    def greedy() -> Outcome:
        def best(block: Positions) -> jax.Array:
            score, token = max_and_argmax(law.allowed(block))
            return jnp.where(score > -jnp.inf, token, NO_TOKEN)  # all may be banned

        return judges.greedy(map_rows(best, positions))

    def probs_at(block: Positions) -> jax.Array:
        settings = law.settings(block)
        return jax.lax.cond(
            jnp.any(settings.temperature > 0),
            lambda: sampled_probs(law.allowed(block), settings, parts.truncated, search),
            lambda: jnp.zeros_like(block.logits),
        )

    def prob_of_follower(block: Positions) -> jax.Array:
        token = block.follower
        return jax.lax.cond(
            jnp.any(block.is_inner),
            lambda: jnp.take_along_axis(probs_at(block), token[:, None], axis=-1)[:, 0],
            lambda: jnp.zeros(token.shape),
        )

    # Most positions need only one probability: the rest of p is not kept.
    target = TargetProbs(
        probs_at,
        lambda: map_rows(prob_of_follower, positions),
        draw_from(probs_at, uses_cond=True),
        uses_cond=True,
    )
    none = Outcome(*(jnp.zeros(is_sampled.shape, jnp.int32),) * 3)
    greedy_outcome = jax.lax.cond(jnp.all(is_sampled), lambda: none, greedy)
    sampled_outcome = jax.lax.cond(
        jnp.any(is_sampled), lambda: judges.sampled(target, positions), lambda: none
    )
    outcome = select(is_sampled, sampled_outcome, greedy_outcome)
    checked = positions.path & ~outcome.path[positions.row] == 0
    return outcome, soundness.sound_of(checked, positions.logits, tokens)


def at_once(
    positions: Positions, law: Law, judges: Judges, parts: SamplingParts, tokens: int
) -> tuple[Outcome, Bool[Array, "n"]]:
    """The outcome, and the soundness of all positions; see `api.verify`.

    All positions at once, without data-dependent control flow. The aim is few passes over the
    logits: a pass finds a few numbers a position, and p is computed from these where it is read. p
    is kept where thresholds are searched in it.
    """
    scores, settings = law.allowed(positions), law.settings(positions)
    if not parts.sampled:
        greedy, sound = soundness.best_and_sound(scores, positions.logits, tokens)
        if parts.adjusted is not False:
            sound &= row_max(scores)[:, 0] > -jnp.inf
        return judges.greedy(greedy), sound
    greedy, normalisation = _normalisation(scores, settings, parts)
    greedy_outcome = judges.greedy(greedy)
    positions = positions._replace(normalisation=normalisation)

    def probs_at(block: Positions) -> jax.Array:
        block_normalisation = block.normalisation
        assert block_normalisation is not None
        uncut = block_normalisation.uncut
        values = law.allowed(block) if uncut is None else uncut
        return _probs_of(block_normalisation, values, law.settings(block))

    def prob_of_follower() -> jax.Array:
        # This sum joins the pass that finds the best token; a look-up would be another pass.
        is_token = jnp.arange(scores.shape[1]) == positions.follower[:, None]
        values = jnp.where(
            is_token, scores if normalisation.uncut is None else normalisation.uncut, 0.0
        )
        return _probs_of(normalisation, values.sum(axis=-1, keepdims=True), settings)[:, 0]

    draw = draw_from(probs_at, uses_cond=False)
    target = TargetProbs(probs_at, prob_of_follower, draw, uses_cond=False)
    sampled_outcome = judges.sampled(target, positions)
    outcome = select(judges.is_sampled, sampled_outcome, greedy_outcome)
    sound = soundness.sound(positions.logits, tokens)
    if parts.adjusted is not False:  # bans may leave nothing
        sound &= normalisation.top[:, 0] > -jnp.inf
    return outcome, sound


def probabilities(
    positions: Positions, law: Law, parts: SamplingParts, search: Search = threshold
) -> Float32[Array, "n V"]:
    """The distributions of all positions; see `api.probabilities`."""
    if parts.sampled:
        # The same numbers as in `at_once`, so that no token it emits is reported as impossible.
        scores, settings = law.allowed(positions), law.settings(positions)
        greedy, normalisation = _normalisation(scores, settings, parts)
        values = scores if normalisation.uncut is None else normalisation.uncut
        sampled = _probs_of(normalisation, values, settings)
        best = jax.nn.one_hot(greedy, scores.shape[1])
        return jnp.where(settings.temperature[:, None] > 0, sampled, best)

    def probs_of_block(block: Positions) -> jax.Array:
        return probs(law.allowed(block), law.settings(block), parts.truncated, search)

    return map_rows(probs_of_block, positions)


def select(is_sampled: Bool[Array, "B"], sampled: Outcome, greedy: Outcome) -> Outcome:
    """The outcomes of sampled and of greedy rows."""
    return jax.tree.map(lambda drawn, best: jnp.where(is_sampled, drawn, best), sampled, greedy)


def draw_from(probs_at: Callable[[Positions], jax.Array], *, uses_cond: bool) -> Draw:
    """`TargetProbs.draw` from distributions that are written out."""

    def draw_block(block: Positions, key: Key, residual: Residual | None) -> jax.Array:
        p = probs_at(block)
        weights = p if residual is None else _weights(p, residual)
        drawn = gumbel_max(weights, key, check_blocks=uses_cond)
        return no_token_where_zero(drawn, p, uses_cond)

    def draw(positions: Positions, key: Key, residual: Residual | None = None) -> jax.Array:
        return map_rows(draw_block, positions, key, residual)

    return draw


def _weights(p: Float32[Array, "n V"], residual: Residual) -> Float32[Array, "n V"]:
    """What is drawn from, not normalised."""
    q = dense(residual.support, residual.q, p.shape[1])
    scaled = p if residual.scale is None else residual.scale[:, None] * p
    left = jnp.where(residual.applies[:, None], jnp.maximum(scaled - q, 0.0), p)
    # If rounding left nothing of the residual, p and q are equal in float32: draw from p.
    return jnp.where(jnp.any(left > 0, axis=-1, keepdims=True), left, p)


def _normalisation(
    scores: Float32[Array, "n V"], settings: DrawSettings, parts: SamplingParts
) -> tuple[Int32[Array, "n"], Normalisation]:
    """The best token of every position, and the numbers that turn its allowed logits into p."""
    best, greedy, total = best_and_mass(scores, temperature_of(settings)[:, None])
    top = best[:, None]
    if not parts.truncated:
        return greedy, Normalisation(top, total)
    uncut = jax.lax.optimization_barrier(weights_of(scores, settings, top) / total)
    return greedy, Normalisation(top, total, truncation.cut(uncut, settings), uncut)


def _probs_of(
    normalisation: Normalisation, values: Float32[Array, "n w"], settings: DrawSettings
) -> Float32[Array, "n w"]:
    """p of some tokens of every position.

    `values` is p before its cut, if that is kept, else the allowed logits. (Computing the former
    again could round differently and cut the last token that stays.)
    """
    if normalisation.cut is not None:
        return truncation.apply(values, normalisation.cut)
    return weights_of(values, settings, normalisation.top) / normalisation.total
