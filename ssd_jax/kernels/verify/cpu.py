"""Verification on processors: XLA's, with the thresholds of `cpu.cc`."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32

from ssd_jax.kernels.handlers import THRESHOLDS


def thresholds(
    p: Float32[Array, "n V"], least: Float32[Array, "n 1"], *, count: bool
) -> Float32[Array, "n 1"]:
    """`threshold.threshold`, summed in float64 and without a search for bits."""
    call = jax.ffi.ffi_call(THRESHOLDS, jax.ShapeDtypeStruct(least[:, 0].shape, jnp.float32))
    return call(p, least[:, 0], count=np.bool_(count))[:, None]
