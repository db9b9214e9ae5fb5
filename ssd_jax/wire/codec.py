"""Messages as bytes: msgpack of a message's fields in order.

Fields are read as the types that `messages` declares, arrays as `messages.PackedArray`. So nothing
that another program sends can become anything else, nor take far more memory than its bytes.
"""

from __future__ import annotations

import functools
import itertools
import operator
import typing
from typing import Any

import msgspec
import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.wire.messages import (
    MESSAGES,
    DraftMessage,
    DraftSpec,
    Entries,
    PackedArray,
    ProtocolError,
)


def _packed(kind: type[DraftMessage]) -> type[msgspec.Struct]:
    """The type of a message with packed arrays, its `kind`, and what the `arrays` must be."""
    hints = typing.get_type_hints(kind, include_extras=True)
    arrays = {
        name: each
        for name, hint in hints.items()
        for each in typing.get_args(hint)
        if isinstance(each, Entries)
    }
    return msgspec.defstruct(
        kind.__name__,
        [(name, PackedArray if name in arrays else hints[name]) for name in kind.__struct_fields__],
        namespace={"kind": kind, "arrays": arrays},
        tag=True,
        array_like=True,
        forbid_unknown_fields=True,
    )


def plain(value: Any) -> Any:
    """What msgspec writes for a NumPy array or scalar."""
    if not isinstance(value, np.ndarray):
        return value.item()  # a NumPy scalar
    dtype = "f4" if value.dtype.kind == "f" else "i4"
    return PackedArray(dtype, value.shape, np.ascontiguousarray(value, f"<{dtype}").tobytes())


_ENCODER = msgspec.msgpack.Encoder(enc_hook=plain)
_DECODER = msgspec.msgpack.Decoder(functools.reduce(operator.or_, map(_packed, MESSAGES)))


def encode(message: DraftMessage) -> bytes:
    """One message as bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes, about: DraftSpec) -> Any:
    """The message in these bytes of `encode`, if it fits what both sides agreed on.

    Raises:
      ProtocolError: the bytes are anything else.
    """
    try:
        packed: Any = _DECODER.decode(data)
    except InputError as error:
        raise ProtocolError(f"sampling: {error}") from None
    except Exception as error:  # msgspec raises several kinds; each means garbage
        raise ProtocolError(f"no message: {error}") from None
    fields, sizes = msgspec.structs.asdict(packed), about.sizes
    fields |= {name: of.read(name, fields[name], sizes) for name, of in packed.arrays.items()}
    _check_ranges({name: (of, fields[name]) for name, of in packed.arrays.items()}, sizes)
    message = packed.kind(**fields)
    message.check(about)
    return message


def _check_ranges(arrays: dict[str, tuple[Entries, np.ndarray]], sizes: dict[str, int]) -> None:
    """Raises: ProtocolError: an entry is not within the range of its array."""
    checked = [(name, *each) for name, each in arrays.items() if each[0].dtype == "i4"]
    checked = [each for each in checked if each[2].size]
    if not checked:
        return
    # Two operations on all entries together: on each array by itself they take twice as long.
    entries = np.concatenate([array for _, _, array in checked], axis=None)
    begins = [0, *itertools.accumulate(array.size for _, _, array in checked[:-1])]
    lows = np.minimum.reduceat(entries, begins).tolist()
    highs = np.maximum.reduceat(entries, begins).tolist()
    for (name, of, _), low, high in zip(checked, lows, highs, strict=True):
        end = of.high if isinstance(of.high, int) else sizes[of.high]
        if low < of.low or high >= end:
            raise ProtocolError(f"{name} from {low} to {high}, not {of.low} to {end - 1}")
