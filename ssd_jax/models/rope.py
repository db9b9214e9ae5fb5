"""Rotary position embedding (half-rotation form) with the scalings of published checkpoints."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, Int32

from ssd_jax.models.config import ModelConfig
from ssd_jax.models.mechanisms import LayerKind
from ssd_jax.models.rope_scaling import RopeScaling


class Rotation(NamedTuple):
    """The rotation of tokens, the same for every head.

    Attributes:
      growth: factor of queries, which grows with positions; None is 1.
    """

    cos: Float32[Array, "B R 1 half"]
    sin: Float32[Array, "B R 1 half"]
    growth: Float32[Array, "B R 1 1"] | None = None

    def queries(
        self, x: Float32[Array, "B R heads head_dim"]
    ) -> Float32[Array, "B R heads head_dim"]:
        """Rotates heads of queries, with their factor."""
        rotated = self(x)
        return rotated if self.growth is None else rotated * self.growth

    def __call__(
        self, x: Float32[Array, "B R heads head_dim"]
    ) -> Float32[Array, "B R heads head_dim"]:
        """Rotates heads; dimension i pairs with i + half, and those from 2 * half on stay."""
        half = self.cos.shape[-1]
        if 2 * half == x.shape[-1]:
            first, second = jnp.split(x, 2, axis=-1)
            rest = []
        else:
            first, second, *rest = jnp.split(x, [half, 2 * half], axis=-1)
        rotated = first * self.cos - second * self.sin, second * self.cos + first * self.sin
        return jnp.concatenate([*rotated, *rest], axis=-1)


class Rotations(NamedTuple):
    """The rotations of tokens in layers of several kinds.

    Attributes:
      kinds: the distinct rotations.
      layers: for each layer, the place of its own in `kinds`.
    """

    kinds: tuple[Rotation, ...]
    layers: tuple[int, ...]

    def of(self, layer: int | Int32[Array, ""]) -> Rotation:
        """The rotation in a layer, whose number may be traced."""
        if len(self.kinds) == 1:
            return self.kinds[0]
        if isinstance(layer, int):
            return self.kinds[self.layers[layer]]
        place = jnp.asarray(self.layers)[layer]
        return jax.tree.map(lambda *parts: jax.lax.select_n(place, *parts), *self.kinds)


def rotations(config: ModelConfig, positions: Int32[Array, "B R"]) -> Rotations:
    """The rotations of every layer at given positions."""
    kinds: list[LayerKind] = [_rope_of(config, layer) for layer in range(config.num_layers)]
    every: tuple[LayerKind, ...] = ("full", "nope", "window")
    distinct: list[LayerKind] = [kind for kind in every if kind in kinds]
    layers = tuple(distinct.index(kind) for kind in kinds)
    return Rotations(tuple(rotation(config, positions, kind) for kind in distinct), layers)


def _rope_of(config: ModelConfig, layer: int) -> LayerKind:
    """The kind of a layer, where its RoPE differs from that of full attention."""
    kind = config.mechanisms.kind(layer)
    return "full" if kind == "window" and config.mechanisms.window_rope_theta is None else kind


def rotation(
    config: ModelConfig, positions: Int32[Array, "B R"], kind: LayerKind = "full"
) -> Rotation:
    """The rotation at given positions."""
    angles = positions[..., None, None].astype(jnp.float32) * inverse_frequencies(config, kind)
    result = jax.lax.platform_dependent(angles, cpu=_rotation_in_halves, default=_rotation)
    factor = config.rope_scaling.attention_factor if config.rope_scaling and kind == "full" else 1.0
    result = result if factor == 1.0 else Rotation(result.cos * factor, result.sin * factor)
    if config.rope_scaling is None or not config.rope_scaling.query_growth:
        return result
    # Positions of rows without tokens may be negative.
    times = jnp.maximum(positions[..., None, None], 0) // config.rope_scaling.original_context
    growth = 1 + config.rope_scaling.query_growth * jnp.log1p(times.astype(jnp.float32))
    return result._replace(growth=growth)


def _rotation(angles: Float32[Array, "*shape"]) -> Rotation:
    return Rotation(jnp.cos(angles), jnp.sin(angles))


def _rotation_in_halves(angles: Float32[Array, "*tokens half"]) -> Rotation:
    """The rotation, as arrays that XLA on CPU does not recompute for every head of every layer.

    XLA does not see through a loop, except one of a single pass.
    """
    halves = angles.reshape(*angles.shape[:-1], 2 - angles.shape[-1] % 2, -1)
    rotations = jax.lax.map(_rotation, jnp.moveaxis(halves, -2, 0))
    return jax.tree.map(lambda half: jnp.moveaxis(half, 0, -2).reshape(angles.shape), rotations)


def inverse_frequencies(
    config: ModelConfig, kind: LayerKind = "full"
) -> Float32[np.ndarray, "half"]:
    """Angles in radians per position; zeros in layers without RoPE."""
    dims = config.mechanisms.rotary_dim or config.head_dim
    exponents = np.arange(0, dims, 2, dtype=np.float64) / dims
    if kind == "nope":
        return np.zeros(exponents.shape, np.float32)
    if kind == "window" and config.mechanisms.window_rope_theta is not None:
        return (config.mechanisms.window_rope_theta**-exponents).astype(np.float32)
    frequencies, scaling = config.rope_theta**-exponents, config.rope_scaling
    if scaling is not None:
        frequencies = _scaled(frequencies, scaling, config)
    return frequencies.astype(np.float32)


def _scaled(frequencies: np.ndarray, scaling: RopeScaling, config: ModelConfig) -> np.ndarray:
    if scaling.kind == "longrope":
        longer = config.max_context > scaling.original_context
        return frequencies / np.array(scaling.long_factors if longer else scaling.short_factors)
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    # What stays of each frequency; the rest is divided.
    blend = _yarn_blend if scaling.kind == "yarn" else _llama3_blend
    stays = blend(frequencies, scaling, config.rope_theta)
    return stays * frequencies + (1 - stays) * frequencies / scaling.factor


def _llama3_blend(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """0 at the longest wavelength that is interpolated, 1 at the shortest."""
    turns = scaling.original_context / (2 * np.pi / frequencies)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    return np.clip((turns - low) / (high - low), 0.0, 1.0)


def _yarn_blend(frequencies: np.ndarray, scaling: RopeScaling, theta: float) -> np.ndarray:
    """1 up to the dimension that turns `beta_fast` times, 0 from that of `beta_slow` turns on."""
    pairs = len(frequencies)

    def dimension(turns: float) -> float:
        return pairs * math.log(scaling.original_context / (turns * 2 * np.pi)) / math.log(theta)

    first, last = dimension(scaling.beta_fast), dimension(scaling.beta_slow)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * pairs - 1)
    width = last - first if last != first else 0.001
    return 1 - np.clip((np.arange(pairs) - first) / width, 0.0, 1.0)
