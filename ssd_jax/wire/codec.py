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
from ssd_jax.wire.draft_spec import DraftMessage, DraftSpec
from ssd_jax.wire.fields import Entries, PackedArray, ProtocolError
from ssd_jax.wire.messages import MESSAGES


def _packed(message_type: type[DraftMessage]) -> type[msgspec.Struct]:
    """The type of a message with packed arrays, its `kind`, and what the `arrays` must be."""
    hints = typing.get_type_hints(message_type, include_extras=True)
    arrays = {
        name: entries
        for name, hint in hints.items()
        for entries in typing.get_args(hint)
        if isinstance(entries, Entries)
    }
    return msgspec.defstruct(
        message_type.__name__,
        [(name, PackedArray if name in arrays else hints[name]) for name in hints],
        namespace={"kind": message_type, "arrays": arrays},
        tag=True,
        array_like=True,
        forbid_unknown_fields=True,
    )


def to_plain(value: Any) -> Any:
    """What msgspec writes for a NumPy array or scalar."""
    if not isinstance(value, np.ndarray):
        return value.item()  # a NumPy scalar
    dtype = "f4" if value.dtype.kind == "f" else "i4"
    return PackedArray(dtype, value.shape, np.ascontiguousarray(value, f"<{dtype}").tobytes())


_ENCODER = msgspec.msgpack.Encoder(enc_hook=to_plain)
_DECODER = msgspec.msgpack.Decoder(functools.reduce(operator.or_, map(_packed, MESSAGES)))


def encode(message: DraftMessage) -> bytes:
    """One message as bytes."""
    return _ENCODER.encode(message)


def decode(data: bytes, spec: DraftSpec) -> Any:
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
    fields, sizes = msgspec.structs.asdict(packed), spec.sizes
    fields |= {
        name: entries.read(name, fields[name], sizes) for name, entries in packed.arrays.items()
    }
    _check_ranges({name: (entries, fields[name]) for name, entries in packed.arrays.items()}, sizes)
    message = packed.kind(**fields)
    message.check(spec)
    return message


def _check_ranges(arrays: dict[str, tuple[Entries, np.ndarray]], sizes: dict[str, int]) -> None:
    """Raises: ProtocolError: an entry is not within the range of its array."""
    integers = [
        (name, bounds, array)
        for name, (bounds, array) in arrays.items()
        if bounds.dtype == "i4" and array.size
    ]
    if not integers:
        return
    # Two operations on all entries together: on each array by itself they take twice as long.
    entries = np.concatenate([array for _, _, array in integers], axis=None)
    begins = [0, *itertools.accumulate(array.size for _, _, array in integers[:-1])]
    lows = np.minimum.reduceat(entries, begins).tolist()
    highs = np.maximum.reduceat(entries, begins).tolist()
    for (name, bounds, _), low, high in zip(integers, lows, highs, strict=True):
        end = bounds.high if isinstance(bounds.high, int) else sizes[bounds.high]
        if low < bounds.low or high >= end:
            raise ProtocolError(f"{name} from {low} to {high}, not {bounds.low} to {end - 1}")
