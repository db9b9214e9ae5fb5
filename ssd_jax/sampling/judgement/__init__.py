"""How each verification rule judges: one file a rule, all with the signature of `judge`."""

from __future__ import annotations

from jaxtyping import Array, Int32

from ssd_jax.kernels.verify.positions import Outcome, Positions, TargetProbs
from ssd_jax.sampling.judgement import block, coupled, ratio, recursive, traversal
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.topology import Parents


def judge(
    rule: str,
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    parents: Parents | None = None,
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones.

    Args:
      rule: a name of `RULES`.
      target: p of the positions.
      positions: all positions, those of a row in order.
      start: position of the round's pending token.
      parents: where the proposed tokens are a tree; see `topology`. None is a chain.
    """
    arguments = target, positions, proposal, sampling, start
    if rule == "coupled":
        return coupled.judge(*arguments, parents)
    if parents is None:
        return {"ratio": ratio.judge, "block": block.judge}[rule](*arguments)
    return {"ratio": recursive.judge, "block": traversal.judge}[rule](*arguments, parents)
