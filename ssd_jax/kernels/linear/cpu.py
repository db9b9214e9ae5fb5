"""Products with packed weights on processors: the handlers of `cpu.cc`, called by XLA."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32, UInt8

from ssd_jax.kernels.handlers import PRODUCTS, TAKE
from ssd_jax.kernels.rows import Norm


@dataclasses.dataclass(frozen=True)
class Packed:
    """A weight [outputs, inputs] in panels.

    Attributes:
      panels: see `kinds`.
      kind: name of its `Kind`.
      outputs: its rows; the last panel may have some that are none.
      inputs: its columns.
      stays: all weights of its model together stay in a cache from call to call.
    """

    panels: UInt8[Array, "_ _"]
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
    panels = [weight.panels for weight in weights]
    stays = np.bool_(all(weight.stays for weight in weights))
    return list(call(x, weight, *panels, kinds=kinds, eps=np.float32(eps), stays=stays))


def take(weight: Packed, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Some rows of a weight; NaN for an index that is none."""
    shape = jax.ShapeDtypeStruct((len(indices), weight.inputs), jnp.float32)
    call = jax.ffi.ffi_call(TAKE, shape)
    return call(indices, weight.panels, kind=weight.kind, outputs=np.int64(weight.outputs))
