"""Matrices of 8-bit floats or integers with scales: of the matrix, its rows, or blocks of it."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from ssd_jax.checkpoints.quantized.scheme import MatrixScheme, MatrixShape, StoredTensors


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
        zero_points = f"{module}.weight_zero_point"
        if zero_points in stored.shapes:
            values -= self._spread(stored.read_stored(zero_points), shape, rows)
        return values * self._spread(stored.read_stored(_scale_name(stored, module)), shape, rows)

    def _spread(
        self, scales: np.ndarray, shape: MatrixShape, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        """The scale of every value in some rows."""
        matrix = scales.astype(np.float32).reshape((*scales.shape, 1, 1)[:2])
        row_block, column_block = self._block(shape, matrix.shape)
        columns = np.repeat(matrix, column_block, axis=1)[:, : shape[1]]
        return columns[np.arange(rows.start, rows.stop) // row_block]

    def _block(self, shape: MatrixShape, scales: tuple[int, ...]) -> MatrixShape:
        """Rows and columns that share one of the scales."""
        (outputs, inputs), (row_scales, column_scales) = shape, scales
        rows = outputs if row_scales == 1 else 1 if row_scales == outputs else self.block[0]
        return rows, inputs if column_scales == 1 else self.block[1]


def _scale_name(stored: StoredTensors, module: str) -> str:
    names = (f"{module}.{suffix}" for suffix in Scaled.needed[0])
    return next(name for name in names if name in stored.shapes)
