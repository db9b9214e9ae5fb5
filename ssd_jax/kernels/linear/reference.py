"""What packed weights hold and what the kernel computes, written in NumPy for reading."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Float64, UInt8

from ssd_jax.kernels.linear.kinds import BFLOAT16, E2M1, FLOAT8, INT8, LANES, W8A8, Kind
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
    units, scales, minima = _unpack(kind, panels, outputs)
    group = units.shape[1] // scales.shape[1]
    values = units * np.repeat(scales, group, axis=1) + np.repeat(minima, group, axis=1)
    return values[:, :inputs].astype(np.float32)


def product(
    x: Float32[np.ndarray, "n inputs"], kind: Kind, panels: Panels, outputs: int
) -> Float32[np.ndarray, "n outputs"]:
    """x @ dense(...)^T with activations of fewer bits: the kernel's result, except for rounding.

    bfloat16, F8_E4M3: activations are rounded to bfloat16. int8: each activation is two int8
    digits, with a scale a row; w8a8: the first digit only. ggml's types: int8 with a scale for each
    32 inputs. Sums of integers are exact; the rest is in float64, and the result is rounded to
    float32.
    """
    if kind in (BFLOAT16, FLOAT8):
        weight = dense(kind, panels, outputs, x.shape[1]).astype(np.float64)
        return (x.astype(ml_dtypes.bfloat16).astype(np.float64) @ weight.T).astype(np.float32)
    units, scales, minima = _unpack(kind, panels, outputs)
    if kind in (INT8, W8A8):
        units = units[:, : x.shape[1]]
        x_scales = _scales(x)
        high = np.round(x / x_scales)
        low = np.round((x / x_scales - high) * np.float32(DIGIT))
        sums = _integer_product(high, units) + (
            _integer_product(low, units) / DIGIT if kind == INT8 else 0
        )
        return (sums * x_scales * scales[:, 0]).astype(np.float32)
    total = np.zeros((len(x), outputs))
    for start in range(0, x.shape[1], kind.group):
        scale_start = start // _ACTIVATIONS * _ACTIVATIONS
        x_scales = _scales(x[:, scale_start : scale_start + _ACTIVATIONS])
        digits = np.round(x[:, start : start + kind.group] / x_scales)
        sums = _integer_product(digits, units[:, start : start + kind.group])
        group = start // kind.group
        minimum_sums = digits.sum(axis=1, dtype=np.float64, keepdims=True) * minima[:, group]
        total += x_scales * (sums * scales[:, group] + minimum_sums)
    return total.astype(np.float32)


def _scales(x: Float32[np.ndarray, "n inputs"]) -> Float32[np.ndarray, "n 1"]:
    absmax = np.maximum(np.abs(x).max(axis=1, keepdims=True), np.float32(_SMALLEST_ABSMAX))
    return absmax / np.float32(LARGEST)


def _integer_product(x: np.ndarray, units: np.ndarray) -> Float64[np.ndarray, "n outputs"]:
    """The products of integers; float64 holds them exactly."""
    return x.astype(np.float64) @ units.T.astype(np.float64)


def _unpack(
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
        parts = units, scales[:, None], np.zeros_like(scales[:, None])
    else:
        streams = panels.reshape(len(panels), -1, kind.block_bytes)
        blocks = [_block(kind, streams[:, index]) for index in range(streams.shape[1])]
        parts = (np.concatenate(block_parts, axis=1) for block_parts in zip(*blocks, strict=True))
    units, scales, minima = (part.swapaxes(1, 2).reshape(len(panels) * LANES, -1) for part in parts)
    return units[:outputs], scales[:outputs], minima[:outputs]


def _block(
    kind: Kind, block: UInt8[np.ndarray, "panels block_bytes"]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block of each panel: integers [panels, inputs, 32], scales and minima [panels, g, 32]."""
    offset = 0

    def read(dtype: str, count: int = 1) -> np.ndarray:
        nonlocal offset
        size = np.dtype(dtype).itemsize * LANES * count
        offset += size
        entries = block[:, offset - size : offset].view(dtype)
        return entries.reshape(len(block), count, -1).astype(np.float64)

    def read_units() -> np.ndarray:
        nonlocal offset
        size = kind.group // kind.per_word * LANES * 4
        offset += size
        units = _units(kind, _steps(block[:, offset - size : offset]))
        if kind.high_bits:
            word = read("u1", 4).astype(np.uint8).reshape(len(block), LANES, 4).swapaxes(1, 2)
            steps = [
                word >> kind.high_bits * i & (1 << kind.high_bits) - 1
                for i in range(kind.group // 4)
            ]
            units += 16.0 * np.concatenate(steps, axis=1)
        return units

    if kind.name in ("Q4_K", "Q5_K"):
        d, dmin = read("<f2"), read("<f2")
        groups = [(read_units(), d * read("u1"), -dmin * read("u1")) for _ in range(8)]
    elif kind.name == "Q6_K":
        d = read("<f2")
        groups = [(read_units(), d * read("i1"), np.zeros_like(d)) for _ in range(16)]
    elif kind.e2m1:
        units, scale = read_units(), np.exp2(read("u1") - 128)
        groups = [(units, scale, np.zeros_like(scale))]
    elif kind == FLOAT8:
        groups = [(read_units(), scale := read("<f4"), np.zeros_like(scale))]
    else:
        units, scale = read_units(), read("<f2")
        groups = [(units, scale, read("<f2") if kind.minima else np.zeros_like(scale))]
    units, scales, minima = (np.concatenate(parts, axis=1) for parts in zip(*groups, strict=True))
    return units, scales, minima


def _steps(words: UInt8[np.ndarray, "panels bytes"]) -> UInt8[np.ndarray, "panels steps 32 4"]:
    return np.ascontiguousarray(words).reshape(len(words), -1, LANES, 4)


def _units(
    kind: Kind, steps: UInt8[np.ndarray, "panels steps 32 4"]
) -> Float64[np.ndarray, "panels inputs 32"]:
    """The integers of consecutive words; of one group, if two integers share a byte; or floats."""
    if kind == FLOAT8:
        steps = steps[..., [0, 2, 1, 3]].view(ml_dtypes.float8_e4m3fn)
    values = steps.swapaxes(2, 3).reshape(len(steps), -1, LANES)
    if kind.per_word == 8:
        values = np.concatenate([values & 0xF, values >> 4], axis=1)
    if kind.e2m1:
        return 2 * np.asarray(E2M1)[values]
    return values.astype(np.float64) - kind.offset
