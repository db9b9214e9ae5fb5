"""Matrices of 8-bit floats or integers with scales: of the matrix, its rows, or blocks of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float32, UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.blocks import pack_floats
from ssd_jax.checkpoints.quantized.scheme import MatrixScheme, MatrixShape, StoredTensors
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.kinds import FLOAT8


@dataclasses.dataclass(frozen=True)
class Scaled(MatrixScheme):
    """`weight` [outputs, inputs] with `weight_scale` or `weight_scale_inv`, both of which multiply,
    and `weight_zero_point` of integers.

    Attributes:
      block: rows and columns that share a scale, if scales are a matrix of more than one column.
    """

    name = "8 bits with scales"
    main = "weight"
    needed = (("weight_scale", "weight_scale_inv"),)
    beside = ("weight_zero_point", "input_scale", "activation_scale", "input_scale_ub")

    block: MatrixShape = (1, 1)

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        outputs, inputs = stored.shapes[f"{module}.weight"]
        name = _scale_name(stored, module)
        scales = (*stored.shapes[name], 1, 1)[:2]
        row_block, column_block = self._block((outputs, inputs), scales)
        if scales != (-(-outputs // row_block), -(-inputs // column_block)):
            raise ValueError(f"scales {[*stored.shapes[name]]} beside weight {[outputs, inputs]}")
        return outputs, inputs

    @override
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        shape = self.shape(stored, module)
        values = stored.read_stored(f"{module}.weight", (rows, slice(0, shape[1])))
        values = values.astype(np.float32)
        if _zero_points(module) in stored.shapes:
            values -= self._spread(stored.read_stored(_zero_points(module)), shape, rows)
        return values * self._spread(stored.read_stored(_scale_name(stored, module)), shape, rows)

    @override
    def group_form(self, stored: StoredTensors, module: str) -> GroupForm | None:
        dtype, group = self._stored_as(stored, module)
        minima = _zero_points(module) in stored.shapes
        if dtype not in ("float8_e4m3fn", "int8") or self.shape(stored, module)[1] % group:
            return None
        return GroupForm(dtype, group, minima)

    @override
    def read_stored_groups(self, stored: StoredTensors, module: str, rows: slice) -> StoredGroups:
        shape, (_, group) = self.shape(stored, module), self._stored_as(stored, module)
        values = stored.read_stored(f"{module}.weight", (rows, slice(0, shape[1])))
        scales = stored.read_stored(_scale_name(stored, module))
        scales, minima = self._spread(scales, shape, rows, group), None
        if _zero_points(module) in stored.shapes:
            zero_points = stored.read_stored(_zero_points(module))
            minima = -self._spread(zero_points, shape, rows, group) * scales
        return StoredGroups(values, scales, minima)

    @override
    def kind(self, stored: StoredTensors, module: str) -> str | None:
        (dtype, group), (_, inputs) = self._stored_as(stored, module), self.shape(stored, module)
        divides = group % FLOAT8.block == 0 or group == inputs
        return FLOAT8.name if dtype == "float8_e4m3fn" and divides else None

    @override
    def read_blocks(
        self, stored: StoredTensors, module: str
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        shape, scales = self.shape(stored, module), stored.read_stored(_scale_name(stored, module))
        scales = self._spread(scales, shape, slice(0, shape[0]), FLOAT8.block)
        return pack_floats(stored.read_stored(f"{module}.weight"), scales)

    def _stored_as(self, stored: StoredTensors, module: str) -> tuple[str, int]:
        """The type of values, and how many inputs share a scale."""
        nothing = stored.read_stored(f"{module}.weight", (slice(0, 0),))
        shape, scales = self.shape(stored, module), stored.shapes[_scale_name(stored, module)]
        _, columns = self._block(shape, (*scales, 1, 1)[:2])
        return nothing.dtype.name, min(columns, shape[1])

    def _spread(
        self, scales: np.ndarray, shape: MatrixShape, rows: slice, every: int = 1
    ) -> Float32[np.ndarray, "rows _"]:
        """The scale of some rows' first value, and of those that many inputs apart."""
        matrix = scales.astype(np.float32).reshape((*scales.shape, 1, 1)[:2])
        row_block, column_block = self._block(shape, matrix.shape)
        columns = matrix[:, np.arange(0, shape[1], every) // column_block]
        return columns[np.arange(rows.start, rows.stop) // row_block]

    def _block(self, shape: MatrixShape, scales: tuple[int, ...]) -> MatrixShape:
        """Rows and columns that share one of the scales."""
        (outputs, inputs), (row_scales, column_scales) = shape, scales
        rows = outputs if row_scales == 1 else 1 if row_scales == outputs else self.block[0]
        return rows, inputs if column_scales == 1 else self.block[1]


def _scale_name(stored: StoredTensors, module: str) -> str:
    names = (f"{module}.{suffix}" for suffix in Scaled.needed[0])
    return next(name for name in names if name in stored.shapes)


def _zero_points(module: str) -> str:
    return f"{module}.weight_zero_point"
