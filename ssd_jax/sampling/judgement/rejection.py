"""What the rules that compare p with q have in common: acceptance noise, and the bonus token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.rows import take_rows
from ssd_jax.kernels.verify.positions import Positions, Residual, TargetProbs
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement.outcome import take_column
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of


def p_of_tokens(target: TargetProbs, proposal: Proposal) -> Float32[Array, "B K"]:
    """p of each proposed token."""
    return target.prob_of().reshape(proposal.tokens.shape[0], -1)[:, :-1]


def uniforms(
    positions: Positions, sampling: Sampling, start: Int32[Array, "B"]
) -> Float32[Array, "B K"]:
    """The uniform that judges each proposed token."""
    settings = sampling_of(sampling, positions.row)
    key = keys.derive(
        settings.seed, settings.request, start[positions.row], positions.position, Purpose.ACCEPT
    )
    return keys.uniform(key).reshape(start.shape[0], -1)[:, :-1]


def finite_q(proposal: Proposal) -> Float32[Array, "B K N"]:
    """The proposal's q; one that is no number is 0."""
    return jnp.where(jnp.isfinite(proposal.q), proposal.q, 0.0)


def padded_q(
    proposal: Proposal,
) -> tuple[Int32[Array, "B K+1 N"], Float32[Array, "B K+1 N"]]:
    """Support and q of each position, none behind K."""
    q_padded = jnp.pad(finite_q(proposal), ((0, 0), (0, 1), (0, 0)))
    support = jnp.pad(proposal.support, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    return support, q_padded


def draw_bonus(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    accepted: Int32[Array, "B"],
    scale: Float32[Array, "B"] | None = None,
) -> Int32[Array, "B"]:
    """The token after the accepted ones: from max(scale p - q, 0) where k < L, else from p.

    Args:
      accepted: k.
      scale: None is 1.
    """
    width = proposal.tokens.shape[1] + 1
    index = jnp.arange(accepted.shape[0]) * width + accepted
    final = jax.tree.map(lambda a: take_rows(a, index), positions)
    key = keys.derive(sampling.seed, sampling.request, start, final.position, Purpose.BONUS)

    # Where a q that is no number has rejected its token, the bonus token is drawn from p.
    support, q = padded_q(proposal)
    residual = Residual(
        take_column(support, accepted),
        take_column(q, accepted),
        accepted < proposal.length,
        scale,
    )
    return target.draw(final, key, residual)
