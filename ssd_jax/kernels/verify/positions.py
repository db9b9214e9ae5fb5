"""What a verification is computed from and results in: plain arrays, and functions of them.

The kernels know neither penalties nor rules. A caller says which logits are allowed, and how the
target's distributions and the proposed tokens decide.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.distribution import DrawSettings
from ssd_jax.kernels.noise import Key
from ssd_jax.kernels.truncation import Cut

NO_TOKEN = -1
"""A draw from a position without a distribution."""


class Normalisation(NamedTuple):
    """What turns allowed logits into p, if it is computed for all positions at once."""

    top: Float32[Array, "n 1"]  # largest allowed logit
    total: Float32[Array, "n 1"]  # of the weights
    cut: Cut | None = None
    uncut: Float32[Array, "n V"] | None = None  # p before its cut, if there is one


class Positions(NamedTuple):
    """The n = B * W positions of a verification, those of a row in order, or a block of them."""

    logits: Float32[Array, "n V"]
    row: Int32[Array, "n"]  # sequence of each
    path: Int32[Array, "n"]  # bit mask of the proposed tokens before it: bit i is token i
    position: Int32[Array, "n"]  # of the token it predicts
    is_inner: Bool[Array, "n"]  # whether a proposed token follows it
    follower: Int32[Array, "n"]  # the proposed token that follows it in a chain; any elsewhere
    number: Int32[Array, "n"]  # of each among all
    normalisation: Normalisation | None = None


class Outcome(NamedTuple):
    """The verification outcome (k, t*) of each row."""

    accepted: Int32[Array, "B"]  # k in 0..L
    bonus: Int32[Array, "B"]  # t*; `NO_TOKEN` where no token can be drawn
    path: Int32[Array, "B"]  # of the accepted tokens; see `Positions`


class Residual(NamedTuple):
    """What a draft's distributions q leave of p: max(scale p - q, 0)."""

    support: Int32[Array, "n N"]  # ids, padded with -1; q is 0 elsewhere
    q: Float32[Array, "n N"]
    applies: Bool[Array, "n"]  # False is p
    scale: Float32[Array, "n"] | None = None  # None is 1


Draw = Callable[[Positions, Key, Residual | None], Int32[Array, "n"]]
"""The token at each position of a block that the noise of its key draws, from p or its residual.
`NO_TOKEN` where p is nothing, or any token if the logits show that."""


class TargetProbs(NamedTuple):
    """The target's p; anything in greedy rows.

    Attributes:
      probs_at: p [n, V] float32 at a block of positions.
      prob_of: p [n] float32 of the `follower` of every position, where there is one.
      draw: draws from p.
      uses_cond: whether the device decides what is computed.
    """

    probs_at: Callable[[Positions], jax.Array]
    prob_of: Callable[[], jax.Array]
    draw: Draw
    uses_cond: bool


class Law(NamedTuple):
    """What turns the logits of positions into distributions.

    Attributes:
      allowed: the allowed logits [n, V] of a block of positions: -inf where a token may not follow.
      settings: the settings of a block of positions.
    """

    allowed: Callable[[Positions], jax.Array]
    settings: Callable[[Positions], DrawSettings]


class Judges(NamedTuple):
    """How proposed tokens are judged.

    Attributes:
      is_sampled: rows with a temperature.
      greedy: the outcome, given the best token [n] of every position.
      sampled: the outcome of sampled rows, anything in greedy ones.
    """

    is_sampled: Bool[Array, "B"]
    greedy: Callable[[jax.Array], Outcome]
    sampled: Callable[[TargetProbs, Positions], Outcome]


class SamplingParts(Protocol):
    """Parts of sampling that some row of a batch needs.

    True: computed for all rows and selected row by row; False: left out, and no row may need it;
    None: decided on the device.
    """

    @property
    def sampled(self) -> bool | None:
        """Rows with a temperature."""
        ...

    @property
    def truncated(self) -> bool | None:
        """Top-k, top-p and min-p."""
        ...

    @property
    def adjusted(self) -> bool | None:
        """Whether allowed logits are other ones than the target's."""
        ...


def no_token_where_zero(
    tokens: Int32[Array, "n"], weights: Float32[Array, "n V"], uses_cond: bool
) -> Int32[Array, "n"]:
    """Tokens drawn by weights, `NO_TOKEN` where there are none; see `Draw`."""
    return jnp.where(jnp.any(weights > 0, axis=-1), tokens, NO_TOKEN) if uses_cond else tokens
