"""Ratio rule (Leviathan et al.; Chen et al.): accept x while u < p(x) / q(x).

At the first rejection the bonus is drawn from the residual max(p - q, 0), after L acceptances from
p. The distribution of the emitted tokens is exactly the target's, whatever q is.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ssd_jax.kernels.rows import map_rows, take_rows
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement.outcome import (
    Outcome,
    count_leading_true,
    is_proposed,
    no_token_where_zero,
    take_column,
)
from ssd_jax.sampling.judgement.positions import Positions, TargetProbs
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal, dense, q_of_tokens
from ssd_jax.sampling.settings import Sampling, sampling_of


def judge(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones; see `judgement.judge`."""
    vocab = positions.logits.shape[1]
    width = proposal.tokens.shape[1] + 1
    tokens = jnp.pad(proposal.tokens, ((0, 0), (0, 1))).reshape(-1)
    p_token = target.prob_of(tokens).reshape(-1, width)[:, :-1]
    settings = sampling_of(sampling, positions.row)
    key = keys.derive(
        settings.seed, settings.request, start[positions.row], positions.position, Purpose.ACCEPT
    )
    u = keys.uniform(key).reshape(-1, width)[:, :-1]
    q_token = q_of_tokens(proposal)
    # u < p / q without a division; u < 1, so p >= q is always accepted and p = 0 never. A token
    # outside the support of q was not drawn from it.
    accepted = count_leading_true((u * q_token < p_token) & (q_token > 0) & is_proposed(proposal))

    index = jnp.arange(accepted.shape[0]) * width + accepted
    final = jax.tree.map(lambda a: take_rows(a, index), positions)
    key = keys.derive(sampling.seed, sampling.request, start, final.position, Purpose.BONUS)

    def bonus(final: Positions, support, q, rejected, key: keys.Key) -> jax.Array:
        p_final, q_final = target.probs_at(final), dense(support, q, vocab)
        residual = jnp.where(rejected, jnp.maximum(p_final - q_final, 0.0), p_final)
        # If rounding left nothing of the residual, p and q are equal in float32: draw from p.
        residual = jnp.where(jnp.any(residual > 0, axis=-1, keepdims=True), residual, p_final)
        return no_token_where_zero(
            keys.gumbel_max(residual, key, check_blocks=target.uses_cond), p_final, target
        )

    # A q that is no number has rejected its token; the bonus token is then drawn from p.
    q = jnp.where(jnp.isfinite(proposal.q), proposal.q, 0.0)
    q_padded = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    support = jnp.pad(proposal.support, ((0, 0), (0, 1), (0, 0)), constant_values=-1)
    rejected = (accepted < proposal.length)[:, None]
    drafted = (take_column(support, accepted), take_column(q_padded, accepted))
    return Outcome(accepted, map_rows(bonus, final, *drafted, rejected, key))
