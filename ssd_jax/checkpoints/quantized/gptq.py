"""GPTQ, as AutoGPTQ and GPTQModel write it: 2, 4 or 8 bits, groups in any order."""

from __future__ import annotations

import dataclasses

import numpy as np
from jaxtyping import Shaped
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
class Gptq(GroupScheme):
    """`qweight` int32 [inputs / p, outputs] with p integers a word, `qzeros` [groups, outputs / p],
    `scales` [groups, outputs], `g_idx` [inputs].

    Attributes:
      bits: of an integer.
      zero_offset: what is added to stored zeros: 1, or 0 in files of the second format.
      symmetric: whether all zeros are half of the range.
    """

    name = "GPTQ"
    main = "qweight"
    needed = (("qzeros",), ("scales",))
    beside = ("g_idx",)

    bits: int
    zero_offset: int
    symmetric: bool

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        words, outputs = stored.shapes[f"{module}.qweight"]
        inputs, scales = words * 32 // self.bits, stored.shapes[f"{module}.scales"]
        if scales[1] != outputs or inputs % scales[0] or outputs % (32 // self.bits):
            raise ValueError(f"scales {[*scales]} beside qweight {[words, outputs]}")
        return outputs, inputs

    @override
    def read_groups(self, stored: StoredTensors, module: str, rows: slice) -> Groups:
        words, _ = stored.shapes[f"{module}.qweight"]
        groups, _ = stored.shapes[f"{module}.scales"]
        packed = stored.read_stored(f"{module}.qweight", (slice(0, words), rows))
        integers = unpack(np.ascontiguousarray(packed.T), self.bits)
        scales = stored.read_stored(f"{module}.scales", (slice(0, groups), rows))
        zeros = unpack(stored.read_stored(f"{module}.qzeros"), self.bits)[:, rows]
        zeros = (zeros + np.uint8(self.zero_offset)) & np.uint8((1 << self.bits) - 1)
        return Groups(integers, scales.T, zeros.T, self._order(stored, module))

    @override
    def layout(self, stored: StoredTensors, module: str) -> GroupLayout | None:
        """None, too, where `g_idx` has groups in another order, whatever `desc_act` says."""
        order = self._order(stored, module)
        size = len(order) // stored.shapes[f"{module}.scales"][0]
        in_order = np.array_equal(order, contiguous_groups(len(order), size))
        return GroupLayout(self.bits, size, symmetric=self.symmetric) if in_order else None

    def _order(self, stored: StoredTensors, module: str) -> Shaped[np.ndarray, "inputs"]:
        """The group of each input."""
        groups, (_, inputs) = stored.shapes[f"{module}.scales"][0], self.shape(stored, module)
        name = f"{module}.g_idx"
        if name not in stored.shapes:
            return contiguous_groups(inputs, inputs // groups)
        order = stored.read_stored(name)
        check_groups(order, inputs, groups)
        return order
