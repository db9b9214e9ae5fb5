"""Parts of arrays of bytes, so that a program is called with few arrays."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, UInt8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["whole"], meta_fields=["at"])
@dataclasses.dataclass(frozen=True)
class Piece:
    """What begins at byte `at` of an array; how far it goes, who reads it knows."""

    whole: UInt8[Array, "_"]
    at: int
