"""Pieces of byte arrays, so that a program is called with few arrays."""

from __future__ import annotations

import dataclasses
import functools

import jax
from jaxtyping import Array, UInt8


@functools.partial(jax.tree_util.register_dataclass, data_fields=["buffer"], meta_fields=["offset"])
@dataclasses.dataclass(frozen=True)
class Piece:
    """Data that begins at byte `offset` of an array; its reader knows where it ends."""

    buffer: UInt8[Array, "_"]
    offset: int
