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
    """A weight [outputs, inputs] in panels.

    Attributes:
      panels: see `kinds`; a `Piece` has the bytes of one panel after the other.
      kind: name of its `Kind`.
      outputs: its rows; the last panel may have some that are none.
      inputs: its columns.
      stays: all weights of its model together stay in a cache from call to call.
    """

    panels: UInt8[Array, "_ _"] | Piece
    kind: str
    outputs: int
    inputs: int
    stays: bool = False


def products(
    x: Float32[Array, "n inputs"], weights: Sequence[Packed], norm: Norm | None = None
) -> list[Float32[Array, "n _"]]:
    """x @ weight^T for each weight, in one call, with x normed before where there is a norm;
    `reference.product` says what is computed.

    A row's bits depend on it alone. A row with a number that is not finite gives NaN, where x is
    rounded to integers.
    """
    shapes = [jax.ShapeDtypeStruct((len(x), weight.outputs), jnp.float32) for weight in weights]
    kinds = "".join(f"{weight.kind} " for weight in weights)
    call = jax.ffi.ffi_call(PRODUCTS, shapes)
    weight, eps = norm or (jnp.zeros(0, jnp.float32), 0.0)
    arrays, at = zip(*map(_place, [weight, *(weight.panels for weight in weights)]), strict=True)
    stays = np.bool_(all(weight.stays for weight in weights))
    at = np.asarray(at, np.int64)
    return list(call(x, *arrays, at=at, kinds=kinds, eps=np.float32(eps), stays=stays))


def take(weight: Packed, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Some rows of a weight that is no piece; NaN for an index that is none."""
    shape = jax.ShapeDtypeStruct((len(indices), weight.inputs), jnp.float32)
    call = jax.ffi.ffi_call(TAKE, shape)
    return call(indices, weight.panels, kind=weight.kind, outputs=np.int64(weight.outputs))


def _place(array: Array | Piece) -> tuple[Array, int]:
    """The array to hand over, and where in it to begin."""
    return (array.whole, array.at) if isinstance(array, Piece) else (array, 0)
