"""Matrices in groups as files have them, for products that read their integers (`GroupForm`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import ml_dtypes
import numpy as np
from jaxtyping import Float32, Int8, Shaped, UInt8

from ssd_jax.kernels.linear.group_form import FLOAT4, LARGEST_EXPONENT, LEAST_EXPONENT, GroupForm

Bytes = UInt8[np.ndarray, "rows blocks bytes"]


class StoredGroups(NamedTuple):
    """Rows of a matrix: a value is number * scale + minimum; minima=None stands for zeros.

    In MXFP4 numbers are the bits of floats of E2M1, and scales exponents of two, plus 127.
    """

    values: Shaped[np.ndarray, "rows inputs"]
    scales: Shaped[np.ndarray, "rows groups"]
    minima: Float32[np.ndarray, "rows groups"] | None = None

    def changed(self, change: Callable[[np.ndarray], np.ndarray]) -> StoredGroups:
        """Each array changed in the same way, which keeps inputs and groups."""
        minima = None if self.minima is None else change(self.minima)
        return StoredGroups(change(self.values), change(self.scales), minima)

    def arranged(self) -> StoredGroups:
        """As products take them: values [groups, group, rows], scales and minima [groups, rows]."""
        rows, groups = self.scales.shape
        values = self.values.T.reshape(groups, -1, rows)
        return StoredGroups(values, self.scales.T, None if self.minima is None else self.minima.T)

    def in_form(self, form: GroupForm) -> StoredGroups:
        """The same values in another form that holds them (`GroupForm.joined`)."""
        repeats = self.values.shape[1] // self.scales.shape[1] // form.group
        scales, minima = np.repeat(self.scales, repeats, axis=1), self.minima
        if minima is not None:
            minima = np.repeat(minima, repeats, axis=1)
        elif form.minima:
            minima = np.zeros_like(scales)
        dtype = {
            "int4": ml_dtypes.int4,
            "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
            FLOAT4: np.uint8,
        }
        values = self.values.astype(dtype.get(form.dtype, form.dtype), copy=False)
        return StoredGroups(values, scales, minima)


def float4_groups(
    codes: UInt8[np.ndarray, "rows groups 32"], exponents: UInt8[np.ndarray, "rows groups"]
) -> StoredGroups:
    """Rows in MXFP4. Values below 2**-123, which no accelerator tells from zeros, become these.

    Raises:
      ValueError: an exponent makes numbers that float32 does not have.
    """
    if (exponents > LARGEST_EXPONENT).any():
        raise ValueError(f"a scale is 2**{int(exponents.max()) - 127}")
    small = exponents < LEAST_EXPONENT
    if small.any():
        codes = np.where(small[..., None], np.uint8(0), codes)
        exponents = np.maximum(exponents, np.uint8(LEAST_EXPONENT))
    return StoredGroups(codes.reshape(len(codes), -1), exponents)


def form_of_kind(kind: str) -> GroupForm | None:
    """The form of ggml's type; None if it has none."""
    return _FORMS.get(kind)


def from_blocks(kind: str, rows: UInt8[np.ndarray, "rows row_bytes"]) -> StoredGroups:
    """Rows of ggml's blocks in the form of their type."""
    if kind == "MXFP4":
        blocks = rows.reshape(len(rows), -1, 17)
        return float4_groups(_nibbles(blocks[..., 1:], 16), blocks[..., 0])
    size, read = _READERS[kind]
    blocks = rows.reshape(len(rows), -1, size)
    numbers, scales, minima = read(blocks)
    form = _FORMS[kind]
    if minima is not None:
        minima = minima.reshape(len(rows), -1)
    scales = scales.reshape(len(rows), -1)
    if minima is not None and form.dtype == "int4":  # 0 to 15 become -8 to 7
        numbers, minima = numbers - np.int8(8), minima + np.float32(8) * scales
    return StoredGroups(numbers.reshape(len(rows), -1), scales, minima)


_Parts = tuple[
    Int8[np.ndarray, "rows blocks inputs"],
    Float32[np.ndarray, "rows blocks groups"],
    Float32[np.ndarray, "rows blocks groups"] | None,
]
_FORMS = {
    "Q4_0": GroupForm("int4", 32),
    "Q4_1": GroupForm("int4", 32, minima=True),
    "Q5_0": GroupForm("int8", 32),
    "Q5_1": GroupForm("int8", 32, minima=True),
    "Q8_0": GroupForm("int8", 32),
    "Q4_K": GroupForm("int4", 32, minima=True),
    "Q5_K": GroupForm("int8", 32, minima=True),
    "Q6_K": GroupForm("int8", 16),
    "MXFP4": GroupForm(FLOAT4, 32),
}


def _halves(blocks: Bytes, start: int, count: int = 1) -> Float32[np.ndarray, "rows blocks count"]:
    stored = np.ascontiguousarray(blocks[..., start : start + 2 * count])
    return stored.view("<f2").astype(np.float32)


def _nibbles(stored: Bytes, width: int) -> UInt8[np.ndarray, "rows blocks inputs"]:
    """The low halves of `width` bytes, their high halves, and so on."""
    parts = stored.reshape(*stored.shape[:2], -1, 1, width)
    return np.concatenate([parts & 15, parts >> 4], axis=3).reshape(*stored.shape[:2], -1)


def _fifth_bits(stored: Bytes) -> UInt8[np.ndarray, "rows blocks 32"]:
    """16 where the bit of an input is set."""
    return np.unpackbits(np.ascontiguousarray(stored), axis=-1, bitorder="little") << 4


def _q4(blocks: Bytes, scales: int) -> _Parts:
    numbers = _nibbles(blocks[..., 2 * scales :], 16).view(np.int8)
    if scales == 1:
        return numbers - np.int8(8), _halves(blocks, 0), None
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _q5(blocks: Bytes, scales: int) -> _Parts:
    start = 2 * scales
    high = _fifth_bits(blocks[..., start : start + 4])
    numbers = (_nibbles(blocks[..., start + 4 :], 16) | high).view(np.int8)
    if scales == 1:
        return numbers - np.int8(16), _halves(blocks, 0), None
    return numbers, _halves(blocks, 0), _halves(blocks, 2)


def _q8_0(blocks: Bytes) -> _Parts:
    return np.ascontiguousarray(blocks[..., 2:]).view(np.int8), _halves(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[np.ndarray, np.ndarray]:
    """Scales and minima of the eight groups of Q4_K and Q5_K."""
    d, dmin = _halves(blocks, 0), _halves(blocks, 2)
    low, high, rest = blocks[..., 4:8], blocks[..., 8:12], blocks[..., 12:16]
    scales = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=-1)
    minima = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=-1)
    return d * scales.astype(np.float32), -dmin * minima.astype(np.float32)


def _q4_k(blocks: Bytes) -> _Parts:
    return _nibbles(blocks[..., 16:], 32).view(np.int8), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> _Parts:
    bits = blocks[..., 16:48, None] >> np.arange(8, dtype=np.uint8) & 1
    high = bits.swapaxes(-1, -2).reshape(*blocks.shape[:2], -1) << 4
    return (_nibbles(blocks[..., 48:], 32) | high).view(np.int8), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> _Parts:
    low = _nibbles(blocks[..., :128], 64)
    pairs = blocks[..., 128:192].reshape(*blocks.shape[:2], 2, 1, 32)
    high = pairs >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    numbers = (low | high.reshape(low.shape) << 4).view(np.int8) - np.int8(32)
    scales = np.ascontiguousarray(blocks[..., 192:208]).view(np.int8).astype(np.float32)
    return numbers, _halves(blocks, 208) * scales, None


_READERS: dict[str, tuple[int, Callable[[Bytes], _Parts]]] = {
    "Q4_0": (18, lambda blocks: _q4(blocks, 1)),
    "Q4_1": (20, lambda blocks: _q4(blocks, 2)),
    "Q5_0": (22, lambda blocks: _q5(blocks, 1)),
    "Q5_1": (24, lambda blocks: _q5(blocks, 2)),
    "Q8_0": (34, _q8_0),
    "Q4_K": (144, _q4_k),
    "Q5_K": (176, _q5_k),
    "Q6_K": (210, _q6_k),
}
