"""Products with packed weights on processors: the handlers of `cpu.cc`, called by XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from ssd_jax.kernels.handlers import PRODUCTS, TAKE
from ssd_jax.kernels.piece import Piece
from ssd_jax.kernels.rows import Norm


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] in panels; or one of each expert, whose panels follow each other.

    Attributes:
      panels: see `kinds`; in a `Piece` the panels' bytes follow each other.
      kind: name of its `Kind`.
      outputs: number of rows; the last panel may have surplus ones.
      inputs: number of columns.
      cache_resident: whether all weights of the model together stay in a cache between calls.
    """

    panels: UInt8[Array, "_ _"] | Piece
    kind: str
    outputs: int
    inputs: int
    cache_resident: bool = False


def products(
    x: Float32[Array, "n inputs"], weights: Sequence[Packed], norm: Norm | None = None
) -> list[Float32[Array, "n _"]]:
    """x @ weight^T for each weight, in one call; x is normed first if a norm is given.

    `reference.product` specifies the result. A row's bits depend only on that row. Where x is
    rounded to integers, a row with a number that is not finite gives NaN.
    """
    shapes = [jax.ShapeDtypeStruct((len(x), weight.outputs), jnp.float32) for weight in weights]
    kinds = "".join(f"{weight.kind} " for weight in weights)
    call = jax.ffi.ffi_call(PRODUCTS, shapes)
    weight, eps = norm or (jnp.zeros(0, jnp.float32), 0.0)
    arrays, offsets = zip(
        *map(buffer_and_offset, [weight, *(weight.panels for weight in weights)]), strict=True
    )
    cache_resident = np.bool_(all(weight.cache_resident for weight in weights))
    offsets = np.asarray(offsets, np.int64)
    return list(
        call(
            x,
            *arrays,
            offsets=offsets,
            kinds=kinds,
            eps=np.float32(eps),
            cache_resident=cache_resident,
        )
    )


def take(weight: Packed, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Rows of a weight that is not a `Piece`; NaN for an index out of range."""
    shape = jax.ShapeDtypeStruct((len(indices), weight.inputs), jnp.float32)
    call = jax.ffi.ffi_call(TAKE, shape)
    return call(indices, weight.panels, kind=weight.kind, outputs=np.int64(weight.outputs))


def buffer_and_offset(array: Array | Piece) -> tuple[Array, int]:
    """The array to pass to the handler, and the byte where the data begins."""
    return (array.buffer, array.offset) if isinstance(array, Piece) else (array, 0)
