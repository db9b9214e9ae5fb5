"""Coupled rule: a proposed token is accepted iff it is the target's own draw.

The token at a position is argmax(log p + Gumbel(seed, request, position)). The text does not
depend on the proposals at all.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from ssd_jax.kernels.verify.positions import Outcome, Positions, TargetProbs
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement.outcome import accept_equal
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.topology import Parents


def judge(
    target: TargetProbs,
    positions: Positions,
    proposal: Proposal,
    sampling: Sampling,
    start: Int32[Array, "B"],
    parents: Parents | None = None,
) -> Outcome:
    """The outcome of sampled rows, anything in greedy ones; see `judgement.judge`."""
    settings = sampling_of(sampling, positions.row)
    # The noise depends on the absolute position only: this key has no start.
    no_start = jnp.zeros_like(positions.position)
    key = keys.derive(settings.seed, settings.request, no_start, positions.position, Purpose.TOKEN)

    drawn = target.draw(positions, key, None)
    return accept_equal(drawn.reshape(start.shape[0], -1), proposal, parents)
