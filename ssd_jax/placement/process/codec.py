"""Messages as bytes: "SSD", the version (1 byte), and msgpack of a message's fields in order.

Fields are read by the types that `messages` declares, arrays as `messages.PackedArray`, so that
nothing that another program sends can become anything else, nor take far more memory than its
bytes.
"""

from __future__ import annotations

import functools
import operator
import typing
from typing import Any

import msgspec
import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.placement.process.messages import (
    MESSAGES,
    DraftMessage,
    Entries,
    Hello,
    PackedArray,
    ProtocolError,
)

VERSION = 4
_START = b"SSD" + bytes([VERSION])


class _OnTheWire(typing.NamedTuple):
    """A message whose arrays are packed.

    Attributes:
      kind: of message.
      packed: the type of its packed form.
      arrays: what they must be.
    """

    kind: type[DraftMessage]
    packed: type[msgspec.Struct]
    arrays: dict[str, Entries]


def _on_the_wire(kind: type[DraftMessage]) -> _OnTheWire:
    hints = typing.get_type_hints(kind, include_extras=True)
    arrays = {
        name: each
        for name, hint in hints.items()
        for each in typing.get_args(hint)
        if isinstance(each, Entries)
    }
    packed = msgspec.defstruct(
        kind.__name__,
        [(name, PackedArray if name in arrays else hints[name]) for name in kind.__struct_fields__],
        tag=True,
        array_like=True,
        forbid_unknown_fields=True,
    )
    return _OnTheWire(kind, packed, arrays)


def _plain(value: Any) -> Any:
    if not isinstance(value, np.ndarray):
        return value.item()  # a NumPy scalar
    dtype = "f4" if value.dtype.kind == "f" else "i4"
    return PackedArray(dtype, value.shape, np.ascontiguousarray(value, f"<{dtype}").tobytes())


_BY_PACKED = {each.packed: each for each in map(_on_the_wire, MESSAGES)}
_ENCODER = msgspec.msgpack.Encoder(enc_hook=_plain)
_DECODER = msgspec.msgpack.Decoder(functools.reduce(operator.or_, _BY_PACKED))


def encode(message: DraftMessage) -> bytes:
    """One message as bytes."""
    return _START + _ENCODER.encode(message)


def decode(data: bytes, about: Hello) -> Any:
    """The message that `encode` made these bytes of, if it fits what both sides agreed on.

    Raises:
      ProtocolError: anything else.
    """
    if data[:3] != _START[:3] or len(data) <= len(_START):
        raise ProtocolError("no message of this protocol")
    if data[3] != VERSION:
        raise ProtocolError(f"version {data[3]} of the protocol; this is version {VERSION}")
    try:
        packed = _DECODER.decode(memoryview(data)[len(_START) :])
    except InputError as error:
        raise ProtocolError(f"sampling: {error}") from None
    except Exception as error:  # msgspec raises some kinds; each means garbage
        raise ProtocolError(f"no message: {error}") from None
    kind, _, arrays = _BY_PACKED[type(packed)]
    fields, sizes = msgspec.structs.asdict(packed), about.sizes
    fields |= {name: of.read(name, fields[name], sizes) for name, of in arrays.items()}
    message = kind(**fields)
    message.check(about)
    return message
