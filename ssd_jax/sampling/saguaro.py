"""Saguaro sampling: proposals that leave prepared bonus tokens to the target (paper, Def. 14).

Where the draft's q is lowered, the residual max(p - q, 0) rises: so a lower q on the tokens that
get a branch makes the bonus token one of them more often, at the price of acceptance. It is exact
whatever is lowered, as long as the stored q is the q of the draw, and the lowered set is fixed
before the draw and does not depend on noise.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.rows import row_sum


def lower(
    q: Float32[Array, "B N"],
    ids: Int32[Array, "B N"],
    candidates: Int32[Array, "B W"],
    count: Int32[Array, "..."],
    c: float | Float32[Array, ""],
) -> Float32[Array, "B N"]:
    """Multiplies q of the first `count` candidates by C and renormalises.

    A row whose candidates cover the whole support of q stays as it is.

    Args:
      ids: tokens of q.
      candidates: likeliest first by the draft's logits; negative ids are none.
      count: D, one for all rows or one a row.
      c: C in [0, 1]; 1 changes nothing.
    """
    count = jnp.broadcast_to(count, q.shape[:1])[:, None]
    chosen = jnp.where(jnp.arange(candidates.shape[1]) < count, candidates, -1)
    is_lowered = jnp.any(ids[:, :, None] == chosen[:, None, :], axis=-1)
    lowered = jnp.where(is_lowered, c * q, q)
    any_unlowered = jnp.any((q > 0) & ~is_lowered, axis=-1, keepdims=True)
    return jnp.where(any_unlowered, lowered / row_sum(lowered), q)
