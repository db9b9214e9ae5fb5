"""Rows of weights in whole tiles, for TPUs.

A TPU keeps an array in tiles of 128 columns. An array whose rows do not fill the last of theirs may
lie transposed, and to look rows up in it XLA copies all of it. With zeros behind its rows, which
take no memory that the tiles do not take anyway, it lies as it is, and a row is read alone.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ssd_jax.kernels.linear.blocks import BLOCK


def whole(inputs: int) -> int:
    """Columns of the tiles that hold so many inputs."""
    return -(-inputs // BLOCK) * BLOCK


def to_tiles(weight: Shaped[Array, "outputs inputs"]) -> Shaped[Array, "outputs columns"]:
    """The weight with zeros behind its inputs, in as many columns as its tiles have."""
    return _widen(weight, whole(weight.shape[1]))


def fill(
    x: Float[Array, "n inputs"], weight: Shaped[Array, "... outputs _"]
) -> Float[Array, "n columns"]:
    """x with zeros behind its inputs where a weight [outputs, columns] has them."""
    if weight.ndim > 2 or x.shape[1] == weight.shape[1]:
        return x
    return _widen(x, weight.shape[1])


def _widen(x: Shaped[Array, "n inputs"], columns: int) -> Shaped[Array, "n columns"]:
    return jnp.pad(x, ((0, 0), (0, columns - x.shape[1])))
