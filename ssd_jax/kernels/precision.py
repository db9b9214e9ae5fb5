"""How precisely products are computed."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def precision(*operands: jax.Array) -> str | None:
    """The `precision` of a product in which float32 operands are not rounded.

    Accelerators would round them to TF32 (GPU) or bfloat16 (TPU), and comparisons with a float32
    reference would show nothing else.
    """
    return "highest" if any(operand.dtype == jnp.float32 for operand in operands) else None
