"""Sums whose rounding does not depend on how many rows are summed at once.

XLA on CPU adds in another order when an array is small than when it is large (seen at 4,096
elements), so that a row summed alone differs in its last bit from the same row in a block. Its
products do not: each row of a product with several rows and columns is computed alike. So sums of
short rows are taken as products with ones.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

LONG = 4096
"""Rows of this many elements are large by themselves."""

_COLUMNS = 8  # one column would be turned back into a sum
_ROWS = 2  # one row rounds in its own way


def row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last axis, x [..., n] float32 -> [..., 1] float32."""
    if x.shape[-1] >= LONG:
        return jnp.sum(x, axis=-1, keepdims=True)
    rows = x.reshape(-1, x.shape[-1])
    padded = jnp.pad(rows, ((0, max(_ROWS - rows.shape[0], 0)), (0, 0)))
    ones = jnp.ones((x.shape[-1], _COLUMNS), jnp.float32)
    total = jax.lax.dot_general(padded, ones, (((1,), (0,)), ((), ())), precision="highest")
    return total[: rows.shape[0], :1].reshape(*x.shape[:-1], 1)
