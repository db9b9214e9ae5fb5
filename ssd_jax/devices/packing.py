"""Packs a program's host arguments in one int32 array.

On an accelerator each array of a call is a separate transfer. Programs are written, and called,
with separate arguments. Besides arrays that are on the device already, a call then passes one
array, whose columns the program takes apart. A processor shares the memory of its arguments; there
packing would cost some microseconds and save nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32

from ssd_jax.models.functional import zeros


class _Columns(NamedTuple):
    """Where an argument lies: [rows, width] of the packed array, from column `begin` on."""

    begin: int
    width: int
    shape: tuple[int, ...]
    dtype: np.dtype


class Packing:
    """The layout of some of a program's arguments in an array [rows, W] int32.

    All arrays have the rows of the first array in front; a scalar is in every row. With one row
    they may have any shape. Values are integers, booleans or float32, which is sent bit by bit.

    Args:
      arguments: structs of all arguments of the program, in trees.
      told: indices of arguments that are on the host.
      either: indices of arguments that a call may have on the host or on the device; each is one
        array.
    """

    def __init__(
        self, arguments: Sequence[Any], told: Sequence[int], either: Sequence[int] = ()
    ) -> None:
        self.told, self.either = tuple(told), tuple(either)
        self.kept = tuple(at for at in range(len(arguments)) if at not in self.told)
        leaves = [leaf for at in (*told, *either) for leaf in jax.tree.leaves(arguments[at])]
        first = next(leaf for leaf in leaves if leaf.shape)
        self._rows, begin = first.shape[0], 0
        self._columns: dict[int, list[_Columns]] = {}
        for at in (*told, *either):
            self._columns[at] = []
            for leaf in jax.tree.leaves(arguments[at]):
                width = math.prod(leaf.shape) // self._rows if leaf.shape else 1
                self._columns[at].append(_Columns(begin, width, leaf.shape, leaf.dtype))
                begin += width
            begin += at in self.either  # a flag: whether the argument is in the packed array
        self._trees = {at: jax.tree.structure(arguments[at]) for at in self._columns}
        self._arguments = arguments
        self._blank: dict[int, jax.Array] = {}
        self.struct = jax.ShapeDtypeStruct((self._rows, begin), jnp.int32, sharding=first.sharding)

    def pack(self, arguments: Sequence[Any]) -> tuple[list[Any], Int32[np.ndarray, "B W"]]:
        """What a program over this packing takes: arguments on the device, and the packed array.

        Raises:
          ValueError: an array on the host has another shape or type.
        """
        kept, array = list(arguments), np.zeros(self.struct.shape, np.int32)
        for at in self.told:
            value = arguments[at]
            leaves = value if isinstance(value, tuple) else (value,)
            for columns, leaf in zip(self._columns[at], leaves, strict=True):
                _put(array, columns, leaf)
        for at in self.either:
            value = arguments[at]
            if isinstance(value, np.ndarray):
                (columns,) = self._columns[at]
                _put(array, columns, value)
                array[:, columns.begin + columns.width] = 1
                kept[at] = self._nothing(at)
        return [kept[at] for at in self.kept], array

    def over(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function over what `pack` returns; on a group of devices, over the group's rows."""

        def packed(*arguments: Any) -> Any:
            *kept, array = arguments
            every = dict(zip(self.kept, kept, strict=True))
            for at, columns in self._columns.items():
                leaves = [self._taken(array, each) for each in columns]
                if at in self.either:
                    here = columns[0].begin + columns[0].width
                    flag = array[:, here].reshape(-1, *(1,) * (leaves[0].ndim - 1))
                    leaves = [jnp.where(flag != 0, leaves[0], every[at])]
                every[at] = jax.tree.unflatten(self._trees[at], leaves)
            return function(*(every[at] for at in sorted(every)))

        return packed

    def _taken(self, array: jax.Array, columns: _Columns) -> jax.Array:
        begin, width, shape, dtype = columns
        piece = array[:, begin : begin + width]
        if not shape:
            piece = piece[0, 0]
        elif shape[0] == self._rows:
            piece = piece.reshape(array.shape[0], *shape[1:])
        else:
            piece = piece.reshape(shape)
        if dtype == jnp.float32:
            return jax.lax.bitcast_convert_type(piece, jnp.float32)
        return piece != 0 if dtype == jnp.bool_ else piece

    def _nothing(self, at: int) -> jax.Array:
        """Placeholder on the device for an argument that is on the host."""
        if at not in self._blank:
            self._blank[at] = zeros(self._arguments[at])
        return self._blank[at]


def _put(array: np.ndarray, columns: _Columns, value: np.ndarray) -> None:
    begin, width, shape, dtype = columns
    if value.shape != shape or value.dtype != dtype:
        raise ValueError(f"{value.dtype}{list(value.shape)} in place of {dtype}{list(shape)}")
    if dtype == np.float32:
        value = value.view(np.int32)
    if width == 1 and value.ndim < 2:  # a scalar is in every row
        array[:, begin] = value
    else:
        array[:, begin : begin + width] = value.reshape(len(array), -1)


class PackedProgram:
    """A compiled program over a packing, called with unpacked arguments.

    Its other attributes are the program's.
    """

    def __init__(self, program: jax.stages.Compiled, packing: Packing) -> None:
        self._program, self._packing = program, packing

    def __call__(self, *arguments: Any) -> Any:
        """Packs the arguments and dispatches the program."""
        kept, array = self._packing.pack(arguments)
        return self._program(*kept, array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)
