"""Weights in blocks of 128 inputs, for TPU7x.

A TPU keeps an array in tiles of its last two axes: 128 columns of 8 rows, or of more. Programs get
their arguments in tiles of 8 rows, but products of bfloat16 on TPU7x take tiles of 16, for which
XLA copies every weight. Where the last axis has 128 columns, tiles of both heights lie alike in
memory, so nothing is copied.
"""

from __future__ import annotations

from typing import Any

from jax.lax import DotDimensionNumbers
from jaxtyping import Array, Int32, Shaped

BLOCK = 128
"""Columns of a tile, of every type and on every TPU."""


def stored_in_blocks(device: Any) -> bool:
    """Whether weights should lie in blocks on a device of JAX. On other TPUs products are as fast
    either way, but what makes their activations is not always fused with them."""
    return device.device_kind == "TPU7x"


def to_blocks(weight: Shaped[Array, "outputs inputs"]) -> Shaped[Array, "blocks outputs 128"]:
    """The weight in blocks of its inputs, which must be a multiple of `BLOCK`."""
    return weight.reshape(weight.shape[0], -1, BLOCK).swapaxes(0, 1)


def contraction(
    x: Shaped[Array, "n inputs"], weight: Shaped[Array, "... outputs _"]
) -> tuple[Shaped[Array, "n ... _"], DotDimensionNumbers]:
    """x and the dimensions of `dot_general` for x @ weight^T, in blocks if the weight is."""
    if weight.ndim == 2:
        return x, (((1,), (1,)), ((), ()))
    return x.reshape(x.shape[0], -1, BLOCK), (((1, 2), (0, 2)), ((), ()))


def take(
    weight: Shaped[Array, "... outputs _"], indices: Int32[Array, "n"]
) -> Shaped[Array, "n inputs"]:
    """Rows of a weight, which may be in blocks."""
    if weight.ndim == 2:
        return weight[indices]
    return weight[:, indices].swapaxes(0, 1).reshape(indices.shape[0], -1)
