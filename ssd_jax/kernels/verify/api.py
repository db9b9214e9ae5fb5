"""The one verification of all targets, and the choice of its implementation."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

from ssd_jax.kernels.kv_pages import chain_path
from ssd_jax.kernels.verify.positions import (
    NO_TOKEN,
    Judges,
    Law,
    Outcome,
    Positions,
    SamplingParts,
)
from ssd_jax.kernels.verify.reference import verify_reference
from ssd_jax.kernels.verify.xla import at_once, decided
from ssd_jax.kernels.verify.xla import probabilities as probabilities_xla


def verify(
    positions: Positions,
    law: Law,
    judges: Judges,
    *,
    parts: SamplingParts,
    tokens: int,
    backend: str = "xla",
) -> Outcome:
    """Accepts proposed tokens and draws the bonus token.

    Args:
      positions: all positions; the first of a row follows its pending token.
      parts: of sampling, as far as they are known.
      tokens: number of ids that exist; logits beyond are vocabulary padding.
      backend: "xla", or "reference".
    """
    if backend == "reference":
        body = verify_reference
    else:
        body = decided if parts.sampled is None else at_once
    outcome, sound = body(positions, law, judges, parts, tokens)
    # Tokens after the first position whose logits give no distribution cannot be accepted, and a
    # bonus token that would come from such a position does not exist.
    rows = judges.is_sampled.shape[0]
    is_checked = positions.path & ~outcome.path[positions.row] == 0
    unsound = (is_checked & ~sound).reshape(rows, -1)
    # The path up to its first unsound row.
    cut = outcome.path & chain_path(jnp.argmax(unsound, axis=1))
    any_unsound = unsound.any(axis=1)
    path = jnp.where(any_unsound, cut, outcome.path)
    bonus = jnp.where(any_unsound, NO_TOKEN, outcome.bonus)
    return Outcome(jax.lax.population_count(path), bonus, path)


def probabilities(positions: Positions, law: Law, *, parts: SamplingParts) -> Float32[Array, "n V"]:
    """The distributions that `verify` draws from, one-hot in greedy rows."""
    return probabilities_xla(positions, law, parts)
