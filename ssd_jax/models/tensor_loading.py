"""How tensors of checkpoints become parameters."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from ssd_jax.kernels.experts.groups import ExpertGroups, ExpertGroupStructs
from ssd_jax.kernels.linear.blocks import to_blocks
from ssd_jax.kernels.linear.groups import GroupQuantized, GroupStructs
from ssd_jax.kernels.linear.packing import pack_bfloat16, pack_int8
from ssd_jax.kernels.linear.quantized import Quantized, quantize
from ssd_jax.kernels.linear.tiles import rows_to_tiles, to_tiles
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.execution import Execution
from ssd_jax.models.layers import ExpertMatrix, Matrix
from ssd_jax.models.parameter_names import MINIMUM, SCALE
from ssd_jax.models.sharding import MeshLayout
from ssd_jax.system.stored_jit import StoredJit

Loaded = jax.Array | GroupQuantized | ExpertGroups
"""A tensor as it is loaded."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TensorLoading:
    """The tensors of a model, and the forms that their weights take (see `weight_forms`).

    Attributes:
      variables: parameters, by the tensors that are in them.
      stored: tensors that are packed as their checkpoint stores them.
      packed, grouped, blocked, widened: weights in these forms, by tensor.
    """

    config: ModelConfig
    execution: Execution
    layout: MeshLayout
    variables: Mapping[str, nnx.Variable]
    stored: Collection[str]
    packed: Mapping[str, Matrix]
    grouped: Mapping[str, Matrix]
    blocked: Mapping[str, Matrix]
    widened: Mapping[str, Matrix]

    def structs(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Checkpoint tensor name -> shape, dtype and sharding to load it with."""
        structs = {}
        for name, variable in self.variables.items():
            if name.endswith((SCALE, MINIMUM)):
                continue  # made from its weight, or read with it
            value, axes, copies = variable.get_value(), variable.axes, self._copies(variable)
            shape = value.shape[-len(axes) :]  # of one layer
            grouped = self.grouped.get(name)
            matrix = self.packed.get(name) or self.blocked.get(name) or self.widened.get(name)
            if matrix := matrix or grouped:
                shape, axes = matrix.shape, matrix.axes
            if copies > 1:
                shape, axes = (shape[0] // copies, *shape[1:]), (None,) * len(shape)
            is_float = grouped or not jnp.issubdtype(value.dtype, jnp.integer)
            dtype = value.dtype if is_float else self.execution.floating
            structs[name] = self.layout.struct(shape, dtype, axes)
        return structs

    def group_structs(self) -> dict[str, GroupStructs | ExpertGroupStructs]:
        """Structs to load each tensor with whose weight is in groups, as `structs`."""

        def struct(name: str) -> jax.ShapeDtypeStruct:
            variable = self.variables[name]
            value, axes, copies = variable.get_value(), variable.axes, self._copies(variable)
            shape = value.shape[-len(axes) :]
            if copies > 1:
                shape, axes = (*shape[:-1], shape[-1] // copies), (None,) * len(shape)
            return self.layout.struct(shape, value.dtype, axes)

        def structs(name: str, matrix: Matrix) -> GroupStructs | ExpertGroupStructs:
            minima = None if matrix.weight_minimum is None else struct(f"{name}{MINIMUM}")
            arrays = struct(name), struct(f"{name}{SCALE}"), minima
            if not isinstance(matrix, ExpertMatrix):
                return GroupStructs(*arrays)
            assert matrix.form is not None
            return ExpertGroupStructs(*arrays, matrix.form)

        return {name: structs(name, matrix) for name, matrix in self.grouped.items()}

    def prepare(self, name: str, array: Loaded) -> dict[str, jax.Array]:
        """Converts a checkpoint tensor, loaded as `structs`, to itself, panels, blocks, whole
        tiles, or int8 rows and scales. A tensor in `stored` already comes in panels, one of
        `group_structs` in groups.

        Returns: arrays by name.
        """
        if isinstance(array, (GroupQuantized, ExpertGroups)):
            arrays = array.values, array.scales, array.minima
            fields = zip((name, f"{name}{SCALE}", f"{name}{MINIMUM}"), arrays, strict=True)
            return {
                field: self._repeat_heads(values, self.variables[field], -1)
                for field, values in fields
                if values is not None
            }
        if name in self.packed:
            pack = _pack_int8 if self.execution.compute == jnp.int8 else _pack_bfloat16
            return {name: array if name in self.stored else pack(array)}
        variable, blocked = self.variables[name], self.blocked.get(name)
        axes, tensor = (blocked or variable).axes, self._repeat_heads(array, blocked or variable, 0)
        if blocked:
            return {name: _sharded(to_blocks, self.layout.sharding(variable.axes))(tensor)}
        if matrix := self.widened.get(name):
            fill = to_tiles if matrix.axes[-1] == "embed" else rows_to_tiles
            tensor = _sharded(fill, self.layout.sharding(axes))(tensor)
        if variable.get_value().dtype != jnp.int8:
            return {name: tensor}
        shardings: Any = Quantized(self.layout.sharding(axes), self.layout.sharding(axes[:-1]))  # type: ignore[arg-type]
        rows = _sharded(quantize, shardings)(tensor)
        return {name: rows.values, f"{name}{SCALE}": rows.scales}

    def _repeat_heads(
        self, array: jax.Array, variable: nnx.Variable | Matrix, axis: Literal[0, -1]
    ) -> jax.Array:
        """An array with the copies of its heads, along an axis, that several devices have."""
        copies = self._copies(variable)
        if copies == 1:
            return array
        before, after = ((), array.shape[1:]) if axis == 0 else (array.shape[:-1], ())
        heads = array.reshape(*before, self.config.num_kv_heads, -1, *after)
        repeated = _repeat(heads, repeats=copies, axis=len(before)).reshape(*before, -1, *after)
        return jax.device_put(repeated, self.layout.sharding(variable.axes))

    def _copies(self, variable: nnx.Variable | Matrix) -> int:
        """Number of copies of each row of its tensor."""
        return self.layout.rules.kv_copies if "kv_heads" in variable.axes else 1


_pack_int8 = StoredJit(lambda weight: pack_int8(*quantize(weight)))
_pack_bfloat16 = StoredJit(pack_bfloat16)
_repeat = StoredJit(jnp.repeat, static=("repeats", "axis"))


@functools.cache
def _sharded(function: Callable[..., Any], shardings: Any) -> StoredJit:
    """A function of the module level, with results of these shardings."""
    return StoredJit(function, out_shardings=shardings)
