"""Block verification (Sun et al., arXiv 2403.10444): proposed tokens are judged together.

In expectation it accepts at least as many tokens as the ratio rule, for the same p and q. With
c_0 = 1 and c_i = min(1, c_{i-1} p(x_i) / q(x_i)), the first i proposed tokens are accepted with
probability c_i. Let S_i be the sum over v of max(c_i p(v) - q(v), 0), p and q being those of the
token behind them. Of all i with u_i < h_i the largest is k, or 0 if there is none:

    h_i = S_i / (S_i + 1 - c_i)  for i < L,      h_L = c_L

The bonus is drawn from max(c_k p - q, 0), after L acceptances from p. If c_k p(x) > q(x) for the
proposed token x behind k others, then c_{k+1} = 1 and more than k are accepted: so, as under the
ratio rule, the bonus is never the token that was rejected.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.rows import map_rows, row_sum
from ssd_jax.kernels.sparse import dense
from ssd_jax.kernels.verify.positions import Outcome, Positions, TargetProbs
from ssd_jax.sampling.judgement.outcome import chain_outcome, is_proposed, take_column
from ssd_jax.sampling.judgement.rejection import draw_bonus, p_of_tokens, padded_q, uniforms
from ssd_jax.sampling.proposal import Proposal, q_of_tokens
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.topology import depth_of
from ssd_jax.sampling.variants import when


def judge(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones; see `judgement.judge`."""
    u = uniforms(positions, sampling, start)
    survival = _survival(p_of_tokens(target, proposal), q_of_tokens(proposal))
    surplus = _surplus(target, positions, proposal, survival)
    c, s = survival[:, 1:], surplus[:, 1:]
    count = jnp.arange(1, c.shape[1] + 1, dtype=jnp.int32)
    # u < h without a division; c = 1 always passes, even where rounding leaves nothing of S.
    passes = jnp.where(count == proposal.length[:, None], u < c, (c >= 1) | (u * (s + (1 - c)) < s))
    accepted = jnp.max(jnp.where(passes & is_proposed(proposal), count, 0), axis=1, initial=0)
    scale = take_column(survival, accepted)
    bonus = draw_bonus(target, positions, proposal, sampling, start, accepted, scale)
    return chain_outcome(accepted, bonus)


def _survival(
    p_token: Float32[Array, "B K"], q_token: Float32[Array, "B K"]
) -> Float32[Array, "B K+1"]:
    """c_0..c_K. A token outside the support of q was not drawn from it, and does not survive."""
    survival = [jnp.ones(p_token.shape[0])]
    for p, q in zip(p_token.T, q_token.T, strict=True):
        survival.append(jnp.where(q > 0, jnp.minimum(survival[-1] * p / q, 1.0), 0.0))
    return jnp.stack(survival, axis=1)


def _surplus(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    survival: Float32[Array, "B K+1"],
) -> Float32[Array, "B K+1"]:
    """S_i for 0 < i < L where 0 < c_i < 1; c_i or S_i elsewhere, which decide the same."""
    if survival.shape[1] <= 2:
        return survival

    def sum_of(block: Positions, support, q, scale) -> jax.Array:
        p = target.probs_at(block)
        excess = jnp.maximum(scale[:, None] * p - dense(support, q, p.shape[1]), 0.0)
        # Without a p the draft ends here, as if L were i: h_i = c_i.
        return jnp.where(jnp.any(p > 0, axis=-1), row_sum(excess)[:, 0], scale)

    def sum_of_needed(block: Positions, support, q, scale) -> jax.Array:
        lengths = jnp.asarray(proposal.length)[block.row]
        depth = depth_of(block.path)
        is_inner = (depth > 0) & (depth < lengths)
        needed = jnp.any(is_inner & (scale > 0) & (scale < 1))
        return when(
            None if target.uses_cond else True,
            needed,
            lambda: sum_of(block, support, q, scale),
            lambda: scale,
        )

    flat = [array.reshape(-1, array.shape[-1]) for array in padded_q(proposal)]
    surplus = map_rows(sum_of_needed, positions, *flat, survival.reshape(-1))
    return surplus.reshape(survival.shape)
