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

from ssd_jax.system.new_arrays import zeros


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
      host_args: indices of arguments that are on the host.
      host_or_device_args: indices of arguments that a call may have on either; each is one array.
    """

    def __init__(
        self,
        arguments: Sequence[Any],
        host_args: Sequence[int],
        host_or_device_args: Sequence[int] = (),
    ) -> None:
        self.host_args, self.host_or_device_args = tuple(host_args), tuple(host_or_device_args)
        self.device_args = tuple(
            index for index in range(len(arguments)) if index not in self.host_args
        )
        leaves = [
            leaf
            for index in (*host_args, *host_or_device_args)
            for leaf in jax.tree.leaves(arguments[index])
        ]
        first = next(leaf for leaf in leaves if leaf.shape)
        self._rows, begin = first.shape[0], 0
        self._columns: dict[int, list[_Columns]] = {}
        for index in (*host_args, *host_or_device_args):
            self._columns[index] = []
            for leaf in jax.tree.leaves(arguments[index]):
                width = math.prod(leaf.shape) // self._rows if leaf.shape else 1
                self._columns[index].append(_Columns(begin, width, leaf.shape, leaf.dtype))
                begin += width
            # A flag in a column of its own: whether the argument is in the packed array.
            begin += index in self.host_or_device_args
        self._trees = {index: jax.tree.structure(arguments[index]) for index in self._columns}
        self._arguments = arguments
        self._blank: dict[int, jax.Array] = {}
        self.struct = jax.ShapeDtypeStruct((self._rows, begin), jnp.int32, sharding=first.sharding)

    def pack(self, arguments: Sequence[Any]) -> tuple[list[Any], Int32[np.ndarray, "B W"]]:
        """What a program over this packing takes: arguments on the device, and the packed array.

        Raises:
          ValueError: an array on the host has another shape or type.
        """
        on_device, array = list(arguments), np.zeros(self.struct.shape, np.int32)
        for index in self.host_args:
            value = arguments[index]
            leaves = value if isinstance(value, tuple) else (value,)
            leaves = [leaf for leaf in leaves if leaf is not None]
            for columns, leaf in zip(self._columns[index], leaves, strict=True):
                _put(array, columns, leaf)
        for index in self.host_or_device_args:
            value = arguments[index]
            if isinstance(value, np.ndarray):
                (columns,) = self._columns[index]
                _put(array, columns, value)
                array[:, columns.begin + columns.width] = 1
                on_device[index] = self._placeholder(index)
        return [on_device[index] for index in self.device_args], array

    def unpack_for(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function over what `pack` returns; on a group of devices, over the group's rows."""

        def packed(*arguments: Any) -> Any:
            *on_device, array = arguments
            arguments_of = dict(zip(self.device_args, on_device, strict=True))
            for index, columns in self._columns.items():
                leaves = [self._unpack(array, leaf_columns) for leaf_columns in columns]
                if index in self.host_or_device_args:
                    flag_column = columns[0].begin + columns[0].width
                    flag = array[:, flag_column].reshape(-1, *(1,) * (leaves[0].ndim - 1))
                    leaves = [jnp.where(flag != 0, leaves[0], arguments_of[index])]
                arguments_of[index] = jax.tree.unflatten(self._trees[index], leaves)
            return function(*(arguments_of[index] for index in sorted(arguments_of)))

        return packed

    def _unpack(self, array: jax.Array, columns: _Columns) -> jax.Array:
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

    def _placeholder(self, index: int) -> jax.Array:
        """Placeholder on the device for an argument that is on the host."""
        if index not in self._blank:
            self._blank[index] = zeros(self._arguments[index])
        return self._blank[index]


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
        on_device, array = self._packing.pack(arguments)
        return self._program(*on_device, array)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)
