"""Rows of weights in whole tiles, for TPUs.

A TPU keeps an array in tiles of 128 columns. An array whose rows do not fill the last of theirs may
lie transposed, and to look rows up in it XLA copies all of it. With zeros behind its rows, which
take no memory that the tiles do not take anyway, it lies as it is, and a row is read alone. Weights
of 128 experts may lie with the experts side by side, of which a kernel would get a copy.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float, Shaped

from ssd_jax.kernels.linear.blocks import BLOCK


def whole(inputs: int) -> int:
    """Columns of the tiles that hold so many inputs."""
    return -(-inputs // BLOCK) * BLOCK


def to_tiles(
    weight: Shaped[Array, "*experts outputs inputs"],
) -> Shaped[Array, "*experts outputs columns"]:
    """The weight with zeros behind its inputs, in as many columns as its tiles have."""
    return widen(weight, whole(weight.shape[-1]))


def rows_to_tiles(
    weight: Shaped[Array, "*experts outputs inputs"],
) -> Shaped[Array, "*experts rows inputs"]:
    """The weight with zeros behind its outputs, in as many rows as whole tiles have columns."""
    outputs = weight.shape[-2]
    stacked = ((0, 0),) * (weight.ndim - 2)
    return jnp.pad(weight, (*stacked, (0, whole(outputs) - outputs), (0, 0)))


def fill(
    x: Float[Array, "n inputs"], weight: Shaped[Array, "... outputs _"]
) -> Float[Array, "n columns"]:
    """x with zeros behind its inputs where a weight [outputs, columns] has them."""
    if weight.ndim > 2 or x.shape[1] == weight.shape[1]:
        return x
    return widen(x, weight.shape[1])


def widen(x: Shaped[Array, "*n inputs"], columns: int) -> Shaped[Array, "*n columns"]:
    """x with zeros behind its inputs."""
    if columns == x.shape[-1]:
        return x
    return jnp.pad(x, (*((0, 0),) * (x.ndim - 1), (0, columns - x.shape[-1])))
