"""How precisely products are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def precision(*operands: jax.Array) -> str | None:
    """For the `precision` of a product: float32 operands are not rounded.

    Accelerators would make TF32 (GPU) or bfloat16 (TPU) of them, and every comparison with a
    float32 reference would tell of that alone.
    """
    return "highest" if any(each.dtype == jnp.float32 for each in operands) else None
