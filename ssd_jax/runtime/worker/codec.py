"""Messages as bytes: magic and version, a msgpack header, then the arrays' raw bytes.

    "SSD" | version (1 byte) | size of the header (4 bytes, little-endian) | header | arrays

The header is [name of the message, its fields in order]; an array's place in it holds
[dtype, shape]. Fields are read by the types that the dataclasses declare, so nothing that another
program sends can become anything else, and no data is executed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import struct
import types
import typing
from typing import Any, Union, get_args, get_origin

import msgpack
import numpy as np

from ssd_jax.runtime.worker import messages
from ssd_jax.runtime.worker.messages import ProtocolError

VERSION = 3
_START = b"SSD" + bytes([VERSION])
_SIZE = struct.Struct("<I")
_DTYPES = {"i4": np.dtype("<i4"), "f4": np.dtype("<f4")}
_LISTS, _LIST_BYTES = 4096, 8  # most lists of a header: some, and one in so many bytes
_LONGEST_TEXT = 2**16  # bytes
_KINDS: dict[str, type] = {
    kind.__name__: kind
    for kind in (
        messages.Hello,
        messages.Welcome,
        messages.Refused,
        messages.Open,
        messages.Prefill,
        messages.Round,
        messages.Winner,
        messages.Speculations,
        messages.Ping,
        messages.Stats,
    )
}


def encode(message: Any) -> bytes:
    """One message as bytes."""
    arrays: list[bytes] = []
    header = msgpack.packb([type(message).__name__, _fields_of(message, arrays)])
    assert header is not None
    return b"".join([_START, _SIZE.pack(len(header)), header, *arrays])


def decode(data: bytes) -> Any:
    """The message that `encode` made these bytes of.

    Raises:
      ProtocolError: anything else.
    """
    begin = len(_START) + _SIZE.size
    if len(data) < begin or data[:3] != _START[:3]:
        raise ProtocolError("no message of this protocol")
    if data[3] != VERSION:
        raise ProtocolError(f"version {data[3]} of the protocol; this is version {VERSION}")
    (size,) = _SIZE.unpack_from(data, len(_START))
    if begin + size > len(data):
        raise ProtocolError(f"a header of {size} bytes in a message of {len(data)}")
    try:
        header = _unpacked(data[begin : begin + size])
    except Exception as error:  # msgpack raises many kinds; each means garbage
        raise ProtocolError(f"an unreadable header: {error!r}") from None
    if not isinstance(header, list) or len(header) != 2 or not isinstance(header[0], str):
        raise ProtocolError("a header that is not [name, fields]")
    if header[0] not in _KINDS:
        raise ProtocolError(f"an unknown message {header[0][:40]!r}")
    rest = _Rest(data, begin + size)
    message = _read(_KINDS[header[0]], header[1], rest)
    if rest.at != len(data):
        raise ProtocolError(f"{len(data) - rest.at} bytes too many")
    return message


def _unpacked(header: bytes) -> Any:
    """Lists, text and numbers of a header; nothing in it takes far more memory than bytes."""
    room = _LISTS + len(header) // _LIST_BYTES

    def count(items: list[Any]) -> list[Any]:
        nonlocal room
        room -= 1
        if room < 0:
            raise ValueError("too many lists")
        return items

    def refuse(_: Any) -> None:
        raise ValueError("a map")

    return msgpack.unpackb(
        header,
        raw=False,
        list_hook=count,
        object_hook=refuse,
        max_str_len=_LONGEST_TEXT,
        max_map_len=0,
        max_bin_len=0,
        max_ext_len=0,
    )


@dataclasses.dataclass
class _Rest:
    """The arrays' bytes, from `at` on."""

    data: bytes
    at: int

    def take(self, about: Any) -> np.ndarray:
        """The next array."""
        if not isinstance(about, list) or len(about) != 2:
            raise ProtocolError("an array without dtype and shape")
        name, shape = about
        if not isinstance(name, str) or name not in _DTYPES or not isinstance(shape, list):
            raise ProtocolError("an array of an unknown kind")
        if not all(type(size) is int and size >= 0 for size in shape) or len(shape) > 4:
            raise ProtocolError("an array of an impossible shape")
        dtype, count = _DTYPES[name], math.prod(shape)
        end = self.at + count * dtype.itemsize
        if end > len(self.data):
            raise ProtocolError(f"an array of {count} entries was cut off")
        try:
            array = np.frombuffer(self.data, dtype, count, self.at).reshape(shape)
        except (ValueError, OverflowError):  # empty, with sizes that no array can have
            raise ProtocolError("an array of an impossible shape") from None
        self.at = end
        return array


@functools.cache
def _types(kind: type) -> tuple[tuple[str, Any], ...]:
    hints = typing.get_type_hints(kind)
    return tuple((field.name, hints[field.name]) for field in dataclasses.fields(kind))


def _fields_of(message: Any, arrays: list[bytes]) -> list[Any]:
    return [_written(getattr(message, name), arrays) for name, _ in _types(type(message))]


def _written(value: Any, arrays: list[bytes]) -> Any:
    if isinstance(value, np.ndarray):
        name = "f4" if value.dtype.kind == "f" else "i4"
        arrays.append(np.ascontiguousarray(value, _DTYPES[name]).tobytes())
        return [name, list(value.shape)]
    if dataclasses.is_dataclass(value):
        return _fields_of(value, arrays)
    if isinstance(value, tuple):
        return [_written(item, arrays) for item in value]
    return value


def _read(kind: Any, value: Any, rest: _Rest) -> Any:
    if kind is np.ndarray:
        return rest.take(value)
    if kind in (int, float, bool, str):
        if type(value) is not kind:
            raise ProtocolError(f"{type(value).__name__} where {kind.__name__} belongs")
        return value
    origin, inner = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return None if value is None else _read(inner[0], value, rest)
    if not isinstance(value, list):
        raise ProtocolError(f"{type(value).__name__} where a list belongs")
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else list(inner)
    else:
        kinds = [of for _, of in _types(kind)]
    if len(kinds) != len(value):
        raise ProtocolError(f"{len(value)} values where {len(kinds)} belong")
    read = [_read(of, item, rest) for of, item in zip(kinds, value, strict=True)]
    if origin is tuple:
        return tuple(read)
    return kind(**{name: item for (name, _), item in zip(_types(kind), read, strict=True)})
