"""The tensors of a GGUF file as they are stored: memory-mapped, dequantised on demand."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path

import ml_dtypes
import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.gguf.header import TensorInfo
from ssd_jax.checkpoints.weights.grouped import StoredGroups, form_of_kind, from_blocks
from ssd_jax.checkpoints.weights.tensors import Index, TensorSource
from ssd_jax.errors import InputError
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.kinds import GGML_KINDS
from ssd_jax.system.files import reading

_UNQUANTISED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}
SUPPORTED = (*_UNQUANTISED, *GGML_KINDS)
"""Storage types, by ggml's names."""
_CONVERTED_ROW = 16384
"""Values passed to gguf as one row. It converts 16 rows at a time; with pieces larger than a
model's rows, NumPy runs long enough without the interpreter lock for two threads to pay off."""
_CONVERTED_ROWS = 16
"""Pieces a call; gguf holds the result of a call twice."""


class GgufTensors(TensorSource):
    """The tensors of an opened file, by ggml's names and in the file's order of rows.

    Raises:
      InputError: the file is cut off, or has a storage type that is not supported.
    """

    def __init__(self, path: Path, infos: Mapping[str, TensorInfo]) -> None:
        self._path, self._infos = path, infos
        self._types = {info.name: _storage_type(info, path) for info in infos.values()}
        self._require_complete(infos)
        with reading(path):
            self._bytes = np.memmap(path, mode="r").view(np.ndarray)
        self.shapes = {name: info.shape for name, info in infos.items()}

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """The part, of which only the rows and blocks that it touches are converted.

        Returns: float32, or float16 and bfloat16 as stored.
        """
        kind, (*rows, columns) = self._types[name], part
        first, last = columns.start // kind.block, math.ceil(columns.stop / kind.block)
        blocks = slice(first * kind.block_bytes, last * kind.block_bytes)
        values = kind.to_float(self.read_blocks(name)[(*rows, blocks)])
        skip = first * kind.block
        return values[..., columns.start - skip : columns.stop - skip]

    @override
    def stored_type(self, name: str) -> str:
        return self._types[name].name

    @override
    def group_form(self, name: str) -> GroupForm | None:
        return form_of_kind(self.stored_type(name))

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        return from_blocks(self.stored_type(name), self.read_blocks(name)[rows])

    @override
    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        return from_blocks(self.stored_type(name), self.read_blocks(name)[expert, rows])

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*rows row_bytes"]:
        info = self._infos[name]
        row_bytes = self._types[name].row_bytes(info.shape[-1])
        size = math.prod(info.shape[:-1]) * row_bytes
        return self._bytes[info.offset : info.offset + size].reshape(*info.shape[:-1], row_bytes)

    def _require_complete(self, infos: Mapping[str, TensorInfo]) -> None:
        end = 0
        for info in infos.values():
            kind = self._types[info.name]
            if info.shape[-1] % kind.block:
                raise InputError(
                    f"{self._path}: tensor {info.name!r} of shape {info.shape} does not divide "
                    f"into {kind.name} blocks of {kind.block}; the file is malformed"
                )
            size = math.prod(info.shape[:-1]) * kind.row_bytes(info.shape[-1])
            end = max(end, info.offset + size)
        file_size = self._path.stat().st_size
        if end > file_size:
            raise InputError(
                f"{self._path} is truncated: its tensors need {end} bytes, the file has "
                f"{file_size}; get the file again"
            )


@dataclasses.dataclass(frozen=True)
class _StorageType:
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
        if self.name in _UNQUANTISED:
            return np.array(stored, order="C").view(_UNQUANTISED[self.name])
        import gguf

        blocks = np.ascontiguousarray(stored).reshape(-1, self.block_bytes)
        blocks_per_row = math.gcd(len(blocks), _CONVERTED_ROW // self.block)
        rows = blocks.reshape(-1, blocks_per_row * self.block_bytes)
        values = np.empty((len(rows), blocks_per_row * self.block), np.float32)
        kind = gguf.GGMLQuantizationType[self.name]
        for start in range(0, len(rows), _CONVERTED_ROWS):
            chunk = slice(start, start + _CONVERTED_ROWS)
            values[chunk] = gguf.quants.dequantize(rows[chunk], kind)
        columns = stored.shape[-1] // self.block_bytes * self.block
        return values.reshape(*stored.shape[:-1], columns)


def _storage_type(info: TensorInfo, path: Path) -> _StorageType:
    import gguf

    try:
        kind = gguf.GGMLQuantizationType(info.type_id)
        name = kind.name
    except ValueError:
        kind, name = None, f"number {info.type_id}"
    if kind is None or name not in SUPPORTED:
        raise InputError(
            f"{path}: tensor {info.name!r} has type {name}, which is not supported; supported: "
            f"{', '.join(SUPPORTED)} (with `dtype='native'` {', '.join(GGML_KINDS)})"
        )
    return _StorageType(name, *gguf.GGML_QUANT_SIZES[kind])
