"""Ratio rule (Leviathan et al.; Chen et al.): accept x while u < p(x) / q(x).

At the first rejection the bonus is drawn from the residual max(p - q, 0), after L acceptances from
p. The distribution of the emitted tokens is exactly the target's, whatever q is.
"""

from __future__ import annotations

from jaxtyping import Array, Int32

from ssd_jax.kernels.verify.positions import Outcome, Positions, TargetProbs
from ssd_jax.sampling.judgement.outcome import chain_outcome, count_leading_true, is_proposed
from ssd_jax.sampling.judgement.rejection import draw_bonus, p_of_tokens, uniforms
from ssd_jax.sampling.proposal import Proposal, q_of_tokens
from ssd_jax.sampling.settings import Sampling


def judge(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones; see `judgement.judge`."""
    p_token, u = p_of_tokens(target, proposal), uniforms(positions, sampling, start)
    q_token = q_of_tokens(proposal)
    # u < p / q without a division; u < 1, so p >= q is always accepted and p = 0 never. A token
    # outside the support of q was not drawn from it.
    accepted = count_leading_true((u * q_token < p_token) & (q_token > 0) & is_proposed(proposal))
    return chain_outcome(
        accepted, draw_bonus(target, positions, proposal, sampling, start, accepted)
    )
