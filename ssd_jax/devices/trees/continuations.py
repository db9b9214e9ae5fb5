"""What a draft proposes behind the nodes of a tree, from its logits there.

Where the target draws with the noise of the position, or is greedy, these are the tokens that the
draft ranks best. Under other rules sampled rows draw them from q, with noise of each node's own.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.devices.trees.growth import Continuations
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.sampling.outputs import Outputs
from ssd_jax.sampling.penalties import GetHistory
from ssd_jax.sampling.ranking import rank
from ssd_jax.sampling.rules import RULES
from ssd_jax.sampling.settings import Sampling
from ssd_jax.sampling.siblings import Place, draw_siblings
from ssd_jax.sampling.variants import ON_DEVICE, Parts


def support_of(drafting: Drafting, outputs: int) -> int:
    """N of the q that trees keep, of a model with so many outputs."""
    return min(drafting.support, outputs) if RULES[drafting.rule].ships_q else 1


def places(
    start: Int32[Array, "B"], depth: Int32[Array, ""], width: int, shape: TreeShape
) -> Place:
    """The places of the nodes of a frontier, B * width, which are at `depth`.

    Every node that is run has a number of its own. On a chain, whose nodes are the first of their
    depths, it is the depth, so that a chain has the draws of `drafting.draw`.
    """
    rows = start.shape[0]
    number = depth + shape.depth * jnp.arange(width, dtype=jnp.int32)
    return Place(
        jnp.repeat(start, width),
        jnp.broadcast_to(depth, rows * width),
        jnp.tile(number, rows),
    )


def continuations(
    logits: Float32[Array, "n outputs"],
    sampling: Sampling,
    place: Place,
    get_history: GetHistory,
    *,
    drafting: Drafting,
    count: int,
    tokens: int,
    outputs: Outputs = None,
    parts: Parts = ON_DEVICE,
) -> Continuations:
    """The continuations of n nodes.

    Where q has fewer than `count` tokens, a sampled row gets any others behind them, so that the
    shape of its tree does not depend on what was drawn: they repeat the first, and are judged as
    tokens that q can no longer draw. A row that is greedy in the draft alone has a q of its best
    token.

    Args:
      drafting: rule and support.
      count: number of continuations.
      logits, sampling, place, get_history, tokens, outputs, parts: see `draw_siblings`.
    """
    common = {"tokens": tokens, "outputs": outputs, "count": count}
    support = drafting.support
    position = place.start + 1 + place.depth
    if RULES[drafting.rule].keyed_by_position:
        ranking = rank(
            logits, sampling, position, get_history, support=support, parts=parts, **common
        )
        best = ranking.tokens[:, :1]
        return Continuations(ranking, best, jnp.ones(best.shape, jnp.float32))
    by_q = parts._replace(sampled=False, truncated=False)
    ranking = rank(logits, sampling, position, get_history, support=count, parts=by_q, **common)
    drawn = draw_siblings(
        logits, sampling, place, get_history, support=support, parts=parts, **common
    )
    hot = (sampling.temperature > 0)[:, None]
    first = jnp.arange(drawn.q.shape[1]) == 0
    repeated = jnp.maximum(drawn.tokens[:, :1], 0)
    siblings = jnp.where(drawn.tokens >= 0, drawn.tokens, repeated)
    return Continuations(
        ranking._replace(tokens=jnp.where(hot, siblings, ranking.tokens)),
        jnp.where(hot, drawn.support, jnp.where(first, ranking.tokens[:, :1], -1)),
        jnp.where(hot, drawn.q, first.astype(jnp.float32)),
    )
