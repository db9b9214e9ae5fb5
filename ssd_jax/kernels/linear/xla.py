"""Products with unpacked weights by XLA, on every platform: the baseline for others."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from ssd_jax.kernels.linear import groups, tiles
from ssd_jax.kernels.linear.blocks import contraction
from ssd_jax.kernels.linear.groups import GroupQuantized
from ssd_jax.kernels.linear.quantized import W8A8, Quantized, digits, integer_product
from ssd_jax.kernels.precision import precision


def product(
    x: Float[Array, "n _"], weight: Float[Array, "... outputs _"] | Quantized | GroupQuantized
) -> Float32[Array, "n outputs"]:
    """x @ weight^T; see `api.products`. A weight in whole tiles (see `tiles`) may have more columns
    than x. Products that share x share its quantised form, which the compiler computes only once.
    """
    if isinstance(weight, GroupQuantized):
        return groups.product(x, weight)
    if isinstance(weight, Quantized):
        x = tiles.fill(x, weight.values)
        return integer_product(digits(x, single=isinstance(weight, W8A8)), weight)
    x = tiles.fill(x, weight)
    x, dimensions = contraction(x.astype(weight.dtype), weight)
    return jax.lax.dot_general(
        x,
        weight,
        dimensions,
        precision=precision(weight),
        preferred_element_type=jnp.float32,
    )
