"""Products of rows with weights, for every model, and the choice of their backend."""

from __future__ import annotations

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.linear import blocks, cpu, groups, quantized, xla
from ssd_jax.kernels.linear.blocks import stored_in_blocks
from ssd_jax.kernels.linear.cpu import Packed
from ssd_jax.kernels.linear.groups import GroupQuantized, ScaledSums
from ssd_jax.kernels.linear.quantized import W8A8, Quantized
from ssd_jax.kernels.rows import Norm, rms_norm

Weight = Float[Array, "... _ _"] | Quantized | GroupQuantized | Packed


def backend(platform: str, dtype: str, *, devices: int = 1) -> str:
    """The backend of products with weights: "cpu", which takes packed weights, or "xla", also where
    `handlers.why_missing` gives a reason against "cpu".

    Args:
      platform: JAX's name of the platform.
      dtype: of the weights; may be "native".
      devices: number of devices that share a weight; packed weights are not sharded.
    """
    packed = platform == "cpu" and dtype != "float32" and devices == 1
    return "cpu" if packed and why_missing() is None else "xla"


def products(
    x: Float[Array, "n inputs"], weights: Sequence[Weight], norm: Norm | None = None
) -> list[Float32[Array, "n _"]]:
    """x @ weight^T for each weight.

    x is normed first if a norm is given, then rounded to the type that the weight multiplies; sums
    are float32, or exact in int32. Either all weights are packed, or none.
    """
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if packed:
        return cpu.products(x, packed, norm)
    x = x if norm is None else rms_norm(x, norm)
    return [xla.product(x, weight) for weight in weights if not isinstance(weight, Packed)]


def take(weight: Weight, indices: Int32[Array, "n"]) -> Float32[Array, "n inputs"]:
    """Rows of a weight."""
    if isinstance(weight, Packed):
        return cpu.take(weight, indices)
    if isinstance(weight, Quantized):
        return quantized.take(weight, indices)
    if isinstance(weight, GroupQuantized):
        return groups.take(weight, indices)
    return blocks.take(weight, indices).astype(jnp.float32)


__all__ = [
    "W8A8",
    "GroupQuantized",
    "Packed",
    "Quantized",
    "ScaledSums",
    "Weight",
    "backend",
    "products",
    "stored_in_blocks",
    "take",
]
