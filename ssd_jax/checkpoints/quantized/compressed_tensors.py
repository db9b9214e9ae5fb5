"""compressed-tensors, of llm-compressor: integers in groups, packed along a row."""

from __future__ import annotations

import dataclasses

import numpy as np
from typing_extensions import override

from ssd_jax.checkpoints.quantized.groups import (
    GroupLayout,
    Groups,
    check_groups,
    contiguous_groups,
    unpack,
)
from ssd_jax.checkpoints.quantized.scheme import GroupScheme, MatrixShape, StoredTensors


@dataclasses.dataclass(frozen=True)
class PackedRows(GroupScheme):
    """`weight_packed` int32 [outputs, inputs / p] with p integers a word, `weight_scale` [outputs,
    groups], `weight_zero_point` [outputs / p, groups], `weight_g_idx` [inputs].

    Attributes:
      bits: of an integer, 4 or 8; half of their range is 0 where there are no zero points.
    """

    name = "packed integers"
    main = "weight_packed"
    needed = (("weight_scale",),)
    beside = ("weight_shape", "weight_zero_point", "weight_g_idx")

    bits: int

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        outputs, words = stored.shapes[f"{module}.weight_packed"]
        inputs = words * 32 // self.bits
        name, scales = f"{module}.weight_shape", stored.shapes[f"{module}.weight_scale"]
        if name in stored.shapes:
            rows, columns = map(int, stored.read_stored(name))
            if rows != outputs or not inputs - 32 // self.bits < columns <= inputs:
                raise ValueError(f"weight_shape says {[rows, columns]}")
            inputs = columns
        if len(scales) != 2 or scales[0] != outputs or inputs % scales[1]:
            raise ValueError(f"scales {[*scales]} beside a matrix of {[outputs, inputs]}")
        return outputs, inputs

    @override
    def read_groups(self, stored: StoredTensors, module: str, rows: slice) -> Groups:
        _, inputs = self.shape(stored, module)
        _, words = stored.shapes[f"{module}.weight_packed"]
        packed = stored.read_stored(f"{module}.weight_packed", (rows, slice(0, words)))
        groups = stored.shapes[f"{module}.weight_scale"][1]
        scales = stored.read_stored(f"{module}.weight_scale", (rows, slice(0, groups)))
        zeros, name = np.full(scales.shape, 1 << (self.bits - 1), np.uint8), _zeros(module)
        if name in stored.shapes:
            words_of_groups = np.ascontiguousarray(stored.read_stored(name).T)
            zeros = unpack(words_of_groups, self.bits)[:, rows].T
        name = f"{module}.weight_g_idx"
        order = contiguous_groups(inputs, inputs // groups)
        if name in stored.shapes:
            order = stored.read_stored(name)
            check_groups(order, inputs, groups)
        return Groups(unpack(packed, self.bits)[:, :inputs], scales, zeros, order)

    @override
    def layout(self, stored: StoredTensors, module: str) -> GroupLayout | None:
        _, inputs = self.shape(stored, module)
        if f"{module}.weight_g_idx" in stored.shapes:
            return None
        groups = stored.shapes[f"{module}.weight_scale"][1]
        symmetric = _zeros(module) not in stored.shapes
        return GroupLayout(self.bits, inputs // groups, symmetric=symmetric)


def _zeros(module: str) -> str:
    return f"{module}.weight_zero_point"
