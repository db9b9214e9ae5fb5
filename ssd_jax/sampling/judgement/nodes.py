"""What the rules that judge a tree by p and q have in common.

The children of a row were drawn from its q one after the other, without replacement, and come in
that order. Those that q has no tokens for come last, with any token: Q is empty then, and they
change nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int32

from ssd_jax.kernels.noise import Key, gumbel_max
from ssd_jax.kernels.verify.positions import TargetProbs, no_token_where_zero
from ssd_jax.sampling import keys, topology
from ssd_jax.sampling.judgement.outcome import is_proposed
from ssd_jax.sampling.judgement.rejection import finite_q
from ssd_jax.sampling.keys import Purpose
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.settings import Sampling, sampling_of
from ssd_jax.sampling.variants import when

State = TypeVar("State")


class Nodes(NamedTuple):
    """The nodes of B trees.

    Attributes:
      exists: whether a node is proposed, in a sampled sequence.
      u: the uniform that judges it.
      support, q: that the first child of its row was drawn from.
    """

    tokens: Int32[Array, "B m"]
    parents: Int32[Array, "B m"]
    exists: Bool[Array, "B m"]
    u: Float32[Array, "B m"]
    support: Int32[Array, "B m N"]
    q: Float32[Array, "B m N"]


def nodes_of(
    proposal: Proposal, sampling: Sampling, start: Int32[Array, "B"], parents: topology.Parents
) -> Nodes:
    """The nodes of what is proposed."""
    count = parents.shape[1]
    return Nodes(
        jnp.asarray(proposal.tokens),
        parents,
        is_proposed(proposal) & (sampling.temperature > 0)[:, None],
        uniforms_of_nodes(sampling, start, count),
        jnp.asarray(proposal.support),
        finite_q(proposal),
    )


def uniforms_of_nodes(
    sampling: Sampling, start: Int32[Array, "B"], count: int
) -> Float32[Array, "B m"]:
    """The uniform that judges each node: its own, so that siblings do not share one."""
    row = jnp.repeat(jnp.arange(start.shape[0]), count)
    place = start[row] + 1 + jnp.tile(jnp.arange(count), start.shape[0])
    settings = sampling_of(sampling, row)
    key = keys.derive(settings.seed, settings.request, start[row], place, Purpose.ACCEPT)
    return keys.uniform(key).reshape(-1, count)


def first_child(
    exists: Bool[Array, "B m"],
    parents: topology.Parents,
    row: Int32[Array, "B R"],
    begin: int | Array = 0,
) -> Int32[Array, "B R"]:
    """The first child of rows that exists, of the nodes from `begin` on; m where there is none."""
    node = jnp.arange(parents.shape[1])
    is_child = exists[:, None] & (parents[:, None] == row[:, :, None]) & (node >= begin)
    return jnp.min(jnp.where(is_child, node, node.size), axis=2).astype(jnp.int32)


def repeat(
    step: Callable[[State], State],
    begin: State,
    needed: Callable[[State], Bool[Array, "B"]],
    most: int,
    target: TargetProbs,
) -> State:
    """The state after a step for as long as a sequence needs one, `most` times at the most."""

    def step_if_needed(_: jax.Array, now: State) -> State:
        # XLA on CPU crashes when it compiles such a step in a loop of unknown length.
        always = None if target.uses_cond else True
        return when(always, jnp.any(needed(now)), step, lambda now: now, now)

    return jax.lax.fori_loop(0, most, step_if_needed, begin)


def draw_by(weights: Float32[Array, "n V"], key: Key, target: TargetProbs) -> Int32[Array, "n"]:
    """Tokens drawn by weights that are not normalised; see `positions.Draw`."""
    drawn = gumbel_max(weights, key, check_blocks=target.uses_cond)
    return no_token_where_zero(drawn, weights, target.uses_cond)
