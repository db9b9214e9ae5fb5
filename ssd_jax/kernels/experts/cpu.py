"""Products with packed weights of experts on processors: a handler of `linear/cpu.cc`."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ssd_jax.kernels.handlers import EXPERT_PRODUCTS
from ssd_jax.kernels.linear.cpu import Packed, buffer_and_offset


def products(
    x: Float32[Array, "m inputs"], group_sizes: Int32[Array, "E"], weights: Sequence[Packed]
) -> list[Float32[Array, "m _"]]:
    """See `api.expert_products`; one call. Each weight holds the panels of all experts, one expert
    after the other. `linear.reference.product` specifies the products with an expert."""
    shapes = [jax.ShapeDtypeStruct((len(x), weight.outputs), jnp.float32) for weight in weights]
    arrays, offsets = zip(*(buffer_and_offset(weight.panels) for weight in weights), strict=True)
    call = jax.ffi.ffi_call(EXPERT_PRODUCTS, shapes)
    return list(
        call(
            x,
            group_sizes,
            *arrays,
            offsets=np.asarray(offsets, np.int64),
            kinds="".join(f"{weight.kind} " for weight in weights),
            cache_resident=np.bool_(all(weight.cache_resident for weight in weights)),
        )
    )
