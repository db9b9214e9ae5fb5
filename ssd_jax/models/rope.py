"""Rotary position embedding (half-rotation form) with the scalings of published checkpoints."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.models.config import ModelConfig, RopeScaling


def inverse_frequencies(config: ModelConfig) -> np.ndarray:
    """[head_dim / 2] float32 radians per position."""
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim
    frequencies = config.rope_theta**-exponents
    scaling = config.rope_scaling
    if scaling is not None:
        scale = _linear if scaling.kind == "linear" else _llama3
        frequencies = scale(frequencies, scaling)
    return frequencies.astype(np.float32)


def _linear(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    return frequencies / scaling.factor


def _llama3(frequencies: np.ndarray, scaling: RopeScaling) -> np.ndarray:
    wavelengths = 2 * np.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    # 0 at the longest wavelength that is interpolated, 1 at the shortest.
    blend = np.clip((scaling.original_context / wavelengths - low) / (high - low), 0.0, 1.0)
    return blend * frequencies + (1 - blend) * frequencies / scaling.factor


def rotation(positions: jax.Array, frequencies: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """cos and sin [B, R, 1, head_dim / 2] float32 for positions [B, R]."""
    angles = positions[..., None, None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates x [B, R, heads, head_dim] float32; dimension i pairs with i + head_dim / 2."""
    first, second = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
