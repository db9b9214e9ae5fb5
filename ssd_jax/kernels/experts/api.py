"""Products of rows with the weights of experts, and the choice of their backend."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.experts import cpu, xla
from ssd_jax.kernels.linear.cpu import Packed
from ssd_jax.kernels.linear.quantized import Quantized

ExpertWeight = Float[Array, "E _ inputs"] | Quantized | Packed
"""One matrix of every expert; int8 values [E, outputs, inputs] have scales [E, outputs]."""


def expert_products(
    x: Float[Array, "m inputs"], group_sizes: Int32[Array, "E"], weights: Sequence[ExpertWeight]
) -> list[Float32[Array, "m _"]]:
    """x[row] @ weight[e]^T for each weight, e being the expert of the row.

    Activations are rounded as in `linear.api.products`; as there, all weights are packed or none.
    A row's bits depend on that row alone, and weights of experts without rows are not read.

    Args:
      x: rows sorted by expert, those of expert 0 first.
      group_sizes: rows of each expert; where they sum to less than m, the rows beyond give zeros.
    """
    packed = [weight for weight in weights if isinstance(weight, Packed)]
    if packed:
        return cpu.products(x, group_sizes, packed)
    unpacked = [weight for weight in weights if not isinstance(weight, Packed)]
    return xla.products(x, group_sizes, unpacked)


__all__ = ["ExpertWeight", "expert_products"]
