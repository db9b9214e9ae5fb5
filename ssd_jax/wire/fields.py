"""What fields of messages may be: types with their limits, and arrays."""

from __future__ import annotations

import math
from typing import Annotated, NamedTuple

import msgspec
import numpy as np
from msgspec import Meta

MAX_INT = 2**31

Count = Annotated[int, Meta(ge=0, lt=MAX_INT)]
Number = Annotated[int, Meta(ge=0)]
"""Number of a message; each message of a stream has a higher one than the message before."""
Text = Annotated[str, Meta(max_length=2**16)]
Seconds = Annotated[float, Meta(ge=0, lt=1e10)]
"""Time on a monotonic clock, which never shows more than three hundred years."""


class ProtocolError(Exception):
    """A received message is not allowed by the protocol."""


class PackedArray(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """An array in a message: its type, "i4" or "f4", little-endian, and its bytes."""

    dtype: str
    shape: Annotated[tuple[Count, ...], Meta(max_length=4)]
    data: bytes


class Entries(NamedTuple):
    """What an array of a message must be.

    Attributes:
      shape: sizes or their names; any other name is one size within a message.
      low, high: entries are at least `low` and less than `high`, a number or the name of a size.
      dtype: "i4" or "f4"; entries of the latter are not checked.
    """

    shape: str
    low: int = 0
    high: int | str = MAX_INT
    dtype: str = "i4"

    def read(self, name: str, packed: PackedArray, sizes: dict[str, int]) -> np.ndarray:
        """Reads the array, whose entries may be any; adds new sizes to `sizes`.

        Raises:
          ProtocolError: its type or shape is not as described.
        """
        shape, names = packed.shape, self.shape.split()
        expected = tuple(
            sizes.setdefault(name, shape[axis] if axis < len(shape) else 0)
            for axis, name in enumerate(names)
        )
        size = 4 * math.prod(expected)
        if (packed.dtype, shape, len(packed.data)) != (self.dtype, expected, size):
            raise ProtocolError(
                f"{name} is {packed.dtype[:9]}{list(shape)} of {len(packed.data)} bytes instead of "
                f"{self.dtype}{list(expected)}"
            )
        return np.frombuffer(packed.data, f"<{self.dtype}").reshape(expected)


def within(name: str, value: int, end: int) -> None:
    """Raises: ProtocolError: a value is not 0 to end - 1."""
    if not 0 <= value < end:
        raise ProtocolError(f"{name} {value} is not within 0 to {end - 1}")
