"""The outcome of a verification, and what all rules use to find it."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32, Shaped

from ssd_jax.sampling.judgement.positions import TargetProbs
from ssd_jax.sampling.params import NO_TOKEN
from ssd_jax.sampling.proposal import Proposal


class Outcome(NamedTuple):
    """The verification outcome (k, t*) of each row."""

    accepted: Int32[Array, "B"]  # k in 0..L
    bonus: Int32[Array, "B"]  # t*; `NO_TOKEN` where no token can be drawn


def accept_equal(target: Int32[Array, "B W"], proposal: Proposal) -> Outcome:
    """Accepts proposed tokens while they equal the target's own."""
    equal = (proposal.tokens == target[:, :-1]) & is_proposed(proposal)
    accepted = count_leading_true(equal)
    return Outcome(accepted, take_column(target, accepted))


def is_proposed(proposal: Proposal) -> Bool[Array, "B K"]:
    """Positions below L."""
    return jnp.arange(proposal.tokens.shape[1]) < proposal.length[:, None]


def count_leading_true(flags: Bool[Array, "B K"]) -> Int32[Array, "B"]:
    """Number of leading entries of each row that are true."""
    return jnp.sum(jnp.cumprod(flags.astype(jnp.int32), axis=1), axis=1, dtype=jnp.int32)


def take_column(
    array: Shaped[Array, "B n ..."], index: Int32[Array, "B"]
) -> Shaped[Array, "B ..."]:
    """array[b, index[b]]."""
    expanded = index.reshape(-1, *(1,) * (array.ndim - 1))
    return jnp.take_along_axis(array, expanded, axis=1)[:, 0]


def no_token_where_zero(
    tokens: Int32[Array, "n"], p: Float32[Array, "n V"], target: TargetProbs
) -> Int32[Array, "n"]:
    """Tokens drawn from p, `NO_TOKEN` where p has none; without `cond`, the logits show that."""
    return jnp.where(jnp.any(p > 0, axis=-1), tokens, NO_TOKEN) if target.uses_cond else tokens
