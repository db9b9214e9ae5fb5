"""GGUF storage types and their conversion to floating point, through the `gguf` package."""

from __future__ import annotations

import dataclasses
import math

import ml_dtypes
import numpy as np

_PLAIN = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SUPPORTED = (*_PLAIN, "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
_PIECE = 16384
"""Values handed to gguf as one row. It converts 16 rows at a time; with pieces larger than a
model's rows NumPy runs long enough without the interpreter lock for two threads to pay."""
_ROWS = 16
"""Pieces a call; gguf holds the result of a call twice."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StorageType:
    """A supported type: `block` values are stored in `block_bytes` bytes."""

    name: str
    block: int
    block_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Bytes of a row; `columns` is a multiple of `block`."""
        return columns // self.block * self.block_bytes

    def to_float(self, stored: np.ndarray) -> np.ndarray:
        """Stored rows, [..., row_bytes] uint8, as numbers [..., columns].

        F32, F16 and BF16 keep their type, everything else becomes float32.
        """
        if self.name in _PLAIN:
            return np.array(stored, order="C").view(_PLAIN[self.name])
        import gguf

        blocks = np.ascontiguousarray(stored).reshape(-1, self.block_bytes)
        together = math.gcd(len(blocks), _PIECE // self.block)
        pieces = blocks.reshape(-1, together * self.block_bytes)
        values = np.empty((len(pieces), together * self.block), np.float32)
        kind = gguf.GGMLQuantizationType[self.name]
        for first in range(0, len(pieces), _ROWS):
            part = slice(first, first + _ROWS)
            values[part] = gguf.quants.dequantize(pieces[part], kind)
        columns = stored.shape[-1] // self.block_bytes * self.block
        return values.reshape(*stored.shape[:-1], columns)


def storage_type(type_id: int) -> StorageType | None:
    """The type with ggml's number `type_id`, or None if it is not supported."""
    import gguf

    name = type_name(type_id)
    if name not in SUPPORTED:
        return None
    block, block_bytes = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[name]]
    return StorageType(name=name, block=block, block_bytes=block_bytes)


def type_name(type_id: int) -> str:
    """ggml's name of a type, or its number if the `gguf` package does not know it."""
    import gguf

    try:
        return gguf.GGMLQuantizationType(type_id).name
    except ValueError:
        return f"number {type_id}"
