"""Coupled rule: a proposed token is accepted iff it is the target's own draw.

The token at a position is argmax(log p + Gumbel(seed, request, position)). The text does not
depend on the proposals at all.

Where branches cost little, tokens are drawn only behind the rows that the text comes through, one
after the other; elsewhere behind all rows at once.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ssd_jax.kernels.rows import map_rows, take_rows
from ssd_jax.kernels.verify.positions import NO_TOKEN, Outcome, Positions, TargetProbs
from ssd_jax.sampling import keys
from ssd_jax.sampling.judgement.outcome import accept_equal, is_proposed
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

    def draw(block: Positions) -> Int32[Array, "n"]:
        settings = sampling_of(sampling, block.row)
        # The noise depends on the absolute position only: this key has no start.
        no_start = jnp.zeros_like(block.position)
        key = keys.derive(settings.seed, settings.request, no_start, block.position, Purpose.TOKEN)
        return target.draw(block, key, None)

    if target.uses_cond and proposal.tokens.shape[1]:
        drawn = _draw_along_paths(draw, positions, proposal, parents)
    else:
        drawn = draw(positions).reshape(start.shape[0], -1)
    return accept_equal(drawn, proposal, parents)


def _draw_along_paths(
    draw: Callable[[Positions], jax.Array],
    positions: Positions,
    proposal: Proposal,
    parents: Parents | None,
) -> Int32[Array, "B W"]:
    """The target's token behind each row whose path it accepts, `NO_TOKEN` behind others."""
    tokens, proposed = jnp.asarray(proposal.tokens), is_proposed(proposal)
    batch, count = tokens.shape
    parent = jnp.broadcast_to(jnp.arange(count), tokens.shape) if parents is None else parents

    def at(index: jax.Array) -> Positions:
        return jax.tree.map(lambda array: take_rows(array, index), positions)

    def draw_of(sequence: jax.Array, root: Positions) -> jax.Array:
        nothing = jnp.full(sequence.shape, NO_TOKEN, jnp.int32)

        def add(node: jax.Array, drawn: jax.Array) -> jax.Array:
            before = jnp.take_along_axis(drawn, parent[sequence, node][:, None], axis=1)[:, 0]
            accepted = proposed[sequence, node] & (tokens[sequence, node] == before)
            row = sequence * (count + 1) + node + 1
            token = jax.lax.cond(jnp.any(accepted), lambda: draw(at(row)), lambda: nothing)
            return drawn.at[:, node + 1].set(jnp.where(accepted, token, NO_TOKEN))

        begin = jnp.pad(draw(root)[:, None], ((0, 0), (0, count)), constant_values=NO_TOKEN)
        return jax.lax.fori_loop(0, count, add, begin)

    every = jnp.arange(batch)
    return map_rows(draw_of, every, at(every * (count + 1)))
