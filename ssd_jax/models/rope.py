"""Rotary position embedding (half-rotation form) with the scalings of published checkpoints."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ssd_jax.models.config import ModelConfig


class Rotation(NamedTuple):
    """The rotation of tokens, the same for every head."""

    cos: Float32[Array, "B R 1 half"]
    sin: Float32[Array, "B R 1 half"]

    def __call__(
        self, x: Float32[Array, "B R heads head_dim"]
    ) -> Float32[Array, "B R heads head_dim"]:
        """Rotates heads; dimension i pairs with i + head_dim / 2."""
        first, second = jnp.split(x, 2, axis=-1)
        rotated = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return jnp.concatenate(rotated, axis=-1)


def rotation(config: ModelConfig, positions: Int32[Array, "B R"]) -> Rotation:
    """The rotation at given positions."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config)
    return jax.lax.platform_dependent(angles, cpu=_rotation_in_halves, default=_rotation)


def _rotation(angles: Float32[Array, "*shape"]) -> Rotation:
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _rotation_in_halves(angles: Float32[Array, "*tokens half"]) -> Rotation:
    """The rotation, as arrays that XLA on CPU does not recompute for every head of every layer.

    XLA does not see through a loop, except one of a single pass.
    """
    halves = angles.reshape(*angles.shape[:-1], 2 - angles.shape[-1] % 2, -1)
    rotations = jax.lax.map(_rotation, jnp.moveaxis(halves, -2, 0))
    return Rotation(*(jnp.moveaxis(half, 0, -2).reshape(angles.shape) for half in rotations))


def inverse_frequencies(config: ModelConfig) -> Float32[np.ndarray, "half"]:
    """Angles in radians per position."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        wavelengths = 2 * np.pi / frequencies
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        # 0 at the longest wavelength that is interpolated, 1 at the shortest.
        blend = np.clip((scaling.original_context / wavelengths - low) / (high - low), 0.0, 1.0)
        frequencies = blend * frequencies + (1 - blend) * frequencies / scaling.factor
    return frequencies.astype(np.float32)
