"""What packed weights hold and what the kernel computes, written in NumPy for reading."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from ssd_jax.kernels.linear.kinds import BFLOAT16, INT8, LANES, W8A8, Kind
from ssd_jax.kernels.linear.quantized import DIGIT, LARGEST

Panels = UInt8[np.ndarray, "panels panel_bytes"]

_SMALLEST_ABSMAX = 1e-30
_ACTIVATIONS = 32
"""Activations that share a scale, whatever the groups of the weight."""


def dense(
    kind: Kind, panels: Panels, outputs: int, inputs: int
) -> Float32[np.ndarray, "outputs inputs"]:
    """The values of a packed weight, each rounded to float32 once."""
    if kind == BFLOAT16:
        values = _steps(panels).view(ml_dtypes.bfloat16).swapaxes(1, 2)
        return values.reshape(len(panels) * LANES, -1)[:outputs, :inputs].astype(np.float32)
    units, scales, minima = _unpacked(kind, panels, outputs)
    group = units.shape[1] // scales.shape[1]
    values = units * np.repeat(scales, group, axis=1) + np.repeat(minima, group, axis=1)
    return values[:, :inputs].astype(np.float32)


def product(
    x: Float32[np.ndarray, "n inputs"], kind: Kind, panels: Panels, outputs: int
) -> Float32[np.ndarray, "n outputs"]:
    """x @ dense(...)^T with activations of fewer bits: the kernel's result, except for rounding.

    bfloat16: activations are rounded to bfloat16. int8: each activation is two int8 digits, with a
    scale a row; w8a8: the first digit only. ggml's types: int8 with a scale for each 32 inputs.
    Sums of integers are exact; the rest is in float64, and the result is rounded to float32.
    """
    if kind == BFLOAT16:
        weight = dense(kind, panels, outputs, x.shape[1]).astype(np.float64)
        return (x.astype(ml_dtypes.bfloat16).astype(np.float64) @ weight.T).astype(np.float32)
    units, scales, minima = _unpacked(kind, panels, outputs)
    if kind in (INT8, W8A8):
        units = units[:, : x.shape[1]]
        x_scales = _scales(x)
        high = np.round(x / x_scales)
        low = np.round((x / x_scales - high) * np.float32(DIGIT))
        sums = _times(high, units) + (_times(low, units) / DIGIT if kind == INT8 else 0)
        return (sums * x_scales * scales[:, 0]).astype(np.float32)
    total = np.zeros((len(x), outputs))
    for first in range(0, x.shape[1], kind.group):
        start = first // _ACTIVATIONS * _ACTIVATIONS
        x_scales = _scales(x[:, start : start + _ACTIVATIONS])
        digits = np.round(x[:, first : first + kind.group] / x_scales)
        sums = _times(digits, units[:, first : first + kind.group])
        at = first // kind.group
        of_minimum = digits.sum(axis=1, dtype=np.float64, keepdims=True) * minima[:, at]
        total += x_scales * (sums * scales[:, at] + of_minimum)
    return total.astype(np.float32)


def _scales(x: Float32[np.ndarray, "n inputs"]) -> Float32[np.ndarray, "n 1"]:
    absmax = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(_SMALLEST_ABSMAX))
    return absmax / np.float32(LARGEST)


def _times(x: np.ndarray, units: np.ndarray) -> Float64[np.ndarray, "n outputs"]:
    """The products of integers; float64 holds them exactly."""
    return x.astype(np.float64) @ units.T.astype(np.float64)


def _unpacked(
    kind: Kind, panels: Panels, outputs: int
) -> tuple[
    Float64[np.ndarray, "outputs inputs"],
    Float64[np.ndarray, "outputs groups"],
    Float64[np.ndarray, "outputs groups"],
]:
    """The integers without their offset, the scales and the minima, padding of K included."""
    if kind in (INT8, W8A8):
        units = _units(kind, _steps(panels[:, : -kind.tail_bytes]))
        scales = panels[:, -kind.tail_bytes :].view("<f4").astype(np.float64)
        found = units, scales[:, None], np.zeros_like(scales[:, None])
    else:
        streams = panels.reshape(len(panels), -1, kind.block_bytes)
        blocks = [_block(kind, streams[:, at]) for at in range(streams.shape[1])]
        found = (np.concatenate(parts, axis=1) for parts in zip(*blocks, strict=True))
    units, scales, minima = (part.swapaxes(1, 2).reshape(len(panels) * LANES, -1) for part in found)
    return units[:outputs], scales[:outputs], minima[:outputs]


def _block(
    kind: Kind, block: UInt8[np.ndarray, "panels block_bytes"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block of each panel: integers [panels, inputs, 32], scales and minima [panels, g, 32]."""
    at = 0

    def take(dtype: str, count: int = 1) -> np.ndarray:
        nonlocal at
        size = np.dtype(dtype).itemsize * LANES * count
        at += size
        entries = block[:, at - size : at].view(dtype)
        return entries.reshape(len(block), count, -1).astype(np.float64)

    def take_units() -> np.ndarray:
        nonlocal at
        size = kind.group // kind.per_word * LANES * 4
        at += size
        units = _units(kind, _steps(block[:, at - size : at]))
        if kind.above:
            word = take("u1", 4).astype(np.uint8).reshape(len(block), LANES, 4).swapaxes(1, 2)
            steps = [word >> kind.above * i & (1 << kind.above) - 1 for i in range(kind.group // 4)]
            units += 16.0 * np.concatenate(steps, axis=1)
        return units

    if kind.name in ("Q4_K", "Q5_K"):
        d, dmin = take("<f2"), take("<f2")
        groups = [(take_units(), d * take("u1"), -dmin * take("u1")) for _ in range(8)]
    elif kind.name == "Q6_K":
        d = take("<f2")
        groups = [(take_units(), d * take("i1"), np.zeros_like(d)) for _ in range(16)]
    else:
        units, scale = take_units(), take("<f2")
        groups = [(units, scale, take("<f2") if kind.minima else np.zeros_like(scale))]
    units, scales, minima = (np.concatenate(parts, axis=1) for parts in zip(*groups, strict=True))
    return units, scales, minima


def _steps(words: UInt8[np.ndarray, "panels bytes"]) -> UInt8[np.ndarray, "panels steps 32 4"]:
    return np.ascontiguousarray(words).reshape(len(words), -1, LANES, 4)


def _units(
    kind: Kind, steps: UInt8[np.ndarray, "panels steps 32 4"]
) -> Float64[np.ndarray, "panels inputs 32"]:
    """The integers of consecutive words; of one group, if two integers share a byte."""
    taken = steps.swapaxes(2, 3).reshape(len(steps), -1, LANES)
    if kind.per_word == 8:
        taken = np.concatenate([taken & 0xF, taken >> 4], axis=1)
    return taken.astype(np.float64) - kind.offset
