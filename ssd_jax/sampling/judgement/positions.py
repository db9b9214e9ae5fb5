"""The positions of a verification, and the target's distributions there."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
from jaxtyping import Array, Float32, Int32

from ssd_jax.sampling.truncation import Cut


class Normalisation(NamedTuple):
    """What turns allowed logits into p, if it is computed for all positions at once."""

    top: Float32[Array, "n 1"]  # largest allowed logit
    total: Float32[Array, "n 1"]  # of the weights
    cut: Cut | None = None
    uncut: Float32[Array, "n V"] | None = None  # p before its cut, if there is one


class Positions(NamedTuple):
    """The n = B * (K + 1) positions of a verification, or a block of them."""

    logits: Float32[Array, "n V"]
    row: Int32[Array, "n"]  # sequence of each
    path: Int32[Array, "n"]  # proposed tokens before it; see `topology`
    position: Int32[Array, "n"]  # of the token it predicts
    normalisation: Normalisation | None = None


class TargetProbs(NamedTuple):
    """The target's p; anything in greedy rows.

    Attributes:
      probs_at: p [n, V] float32 at a block of positions.
      prob_of: p [n] float32 of a token [n] at every position, where a proposed token may be.
      uses_cond: whether the device decides what is computed.
    """

    probs_at: Callable[[Positions], jax.Array]
    prob_of: Callable[[jax.Array], jax.Array]
    uses_cond: bool
