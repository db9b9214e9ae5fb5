"""The header of a GGUF file: metadata and tensor directory, as plain Python values.

`gguf.GGUFReader` keeps several NumPy views for every token and merge, and takes seconds to open a
file with a vocabulary of 150k; this module reads the same bytes in a tenth of a second and checks
that the file holds what its header describes. Format:
https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.system.files import open_regular, reading, shown

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {**dict(enumerate("BbHhIif?")), 10: "Q", 11: "q", 12: "d"}
"""Codes of `struct` by metadata type."""
_STRING, _ARRAY = 8, 9
_LENGTH = struct.Struct("<Q")
_DEFAULT_ALIGNMENT = 32
_MAX_DIMENSIONS = 4
_MAX_VALUES = 1 << 22
"""Most metadata values of a file, counting each item of a list; vocabularies have a tenth."""
_MIN_KEY, _MIN_TENSOR = 13, 24
"""Bytes of the shortest entry."""


class TensorInfo(NamedTuple):
    """One stored tensor.

    `shape` is outermost first ([out, in]), `type_id` is ggml's number of the storage type, and
    `offset` counts from the start of the file.
    """

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


class Header(NamedTuple):
    """Metadata by key (numbers, booleans, strings and lists of them) and tensors by name."""

    metadata: Mapping[str, Any]
    tensors: Mapping[str, TensorInfo]


def read_header(path: Path) -> Header:
    """Reads the header of a GGUF file.

    Raises:
      InputError: the file is not GGUF or has an unsupported version, or its header is cut off or
        malformed.
    """
    with open_regular(path) as file, reading(path):
        magic = file.read(len(MAGIC))
        if magic != MAGIC:
            raise InputError(
                f"{path} is not a GGUF file: expected it to start with {MAGIC!r}, found {magic!r}"
            )
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            cursor = _Cursor(data, path)
            try:
                return _parse(cursor)
            except (ValueError, ArithmeticError) as error:
                raise InputError(
                    f"{path}: the GGUF header is malformed near byte {cursor.position} ({error}); "
                    "get the file again"
                ) from None


def _parse(cursor: _Cursor) -> Header:
    version = cursor.scalar("I")
    if version not in _VERSIONS:
        hint = " (a big-endian file)" if version & 0xFFFF == 0 else ""
        raise InputError(
            f"{cursor.path}: GGUF version {version}{hint} is not supported; supported: "
            f"{', '.join(map(str, _VERSIONS))}, little-endian"
        )
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    cursor.require_bytes(metadata_count * _MIN_KEY + tensor_count * _MIN_TENSOR)
    metadata: dict[str, Any] = {}
    for _ in range(metadata_count):
        key = cursor.string()
        if key in metadata:
            raise ValueError(f"the key {shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.scalar("I"))
    relative: dict[str, TensorInfo] = {}
    for _ in range(tensor_count):
        info = _tensor_info(cursor)
        if info.name in relative:
            raise ValueError("a tensor name occurs twice")
        relative[info.name] = info
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1:
        raise ValueError(f"general.alignment is {shown(alignment)}")
    start = -(-cursor.position // alignment) * alignment
    tensors = {name: info._replace(offset=start + info.offset) for name, info in relative.items()}
    return Header(metadata, tensors)


def _tensor_info(cursor: _Cursor) -> TensorInfo:
    """A directory entry, its offset still relative to the start of the data."""
    name = cursor.string()
    dimensions = cursor.scalar("I")
    if not 1 <= dimensions <= _MAX_DIMENSIONS:
        raise ValueError(f"tensor {shown(name)} has {dimensions} dimensions")
    innermost_first = cursor.scalars("Q", dimensions)
    if 0 in innermost_first:
        raise ValueError(f"tensor {shown(name)} has shape {innermost_first[::-1]}")
    return TensorInfo(name, innermost_first[::-1], cursor.scalar("I"), cursor.scalar("Q"))


class _Cursor:
    """Reads little-endian values one after the other, never past the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self.path = path
        self.position = len(MAGIC)
        self._values = 0

    def require_bytes(self, count: int) -> None:
        """Refuses a file with fewer than `count` bytes after this place."""
        self._advance(count)
        self.position -= count

    def _advance(self, count: int) -> int:
        start, self.position = self.position, self.position + count
        if self.position > self._size:
            raise InputError(
                f"{self.path} is truncated in its header: expected at least {self.position} bytes, "
                f"found {self._size}; get the file again"
            )
        return start

    def scalars(self, code: str, count: int) -> tuple[Any, ...]:
        size = struct.calcsize("<" + code) * count
        return struct.unpack_from(f"<{count}{code}", self._data, self._advance(size))

    def scalar(self, code: str) -> Any:
        return self.scalars(code, 1)[0]

    def string(self) -> str:
        (length,) = _LENGTH.unpack_from(self._data, self._advance(_LENGTH.size))
        start = self._advance(length)
        return self._data[start : start + length].decode("utf-8")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ValueError(f"unknown metadata type {kind}")
        if depth == _MAX_DIMENSIONS:
            raise ValueError(f"lists within each other, more than {depth}")
        kind, count = self.scalar("I"), self.scalar("Q")
        self._values += count
        if self._values > _MAX_VALUES:
            raise ValueError(f"more than {_MAX_VALUES} metadata values")
        if kind in _SCALARS:
            return list(self.scalars(_SCALARS[kind], count))
        return [self.value(kind, depth + 1) for _ in range(count)]
