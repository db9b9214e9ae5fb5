"""AWQ, as AutoAWQ writes it ("gemm"): 4 bits, columns of a word in an order of its own."""

from __future__ import annotations

import numpy as np
from jaxtyping import Shaped, UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.groups import GroupLayout, Groups, contiguous_groups, unpack
from ssd_jax.checkpoints.quantized.scheme import GroupScheme, MatrixShape, StoredTensors

_PER_WORD = 8
_ORDER = np.argsort([0, 2, 4, 6, 1, 3, 5, 7])  # place in a word of each of eight outputs


class Awq(GroupScheme):
    """`qweight` int32 [inputs, outputs / 8], `qzeros` [groups, outputs / 8], `scales` [groups,
    outputs]."""

    name = "AWQ"
    main = "qweight"
    needed = (("qzeros",), ("scales",))

    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        inputs, words = stored.shapes[f"{module}.qweight"]
        groups, outputs = stored.shapes[f"{module}.scales"]
        if outputs != words * _PER_WORD or inputs % groups:
            raise ValueError(f"scales {[groups, outputs]} beside qweight {[inputs, words]}")
        return outputs, inputs

    @override
    def read_groups(self, stored: StoredTensors, module: str, rows: slice) -> Groups:
        inputs, _ = stored.shapes[f"{module}.qweight"]
        groups, _ = stored.shapes[f"{module}.scales"]
        scales = stored.read_stored(f"{module}.scales", (slice(0, groups), rows))
        return Groups(
            _outputs(stored, f"{module}.qweight", rows),
            scales.T,
            _outputs(stored, f"{module}.qzeros", rows),
            contiguous_groups(inputs, inputs // groups),
        )

    @override
    def layout(self, stored: StoredTensors, module: str) -> GroupLayout:
        groups, (_, inputs) = stored.shapes[f"{module}.scales"][0], self.shape(stored, module)
        return GroupLayout(4, inputs // groups, symmetric=False)


def _outputs(stored: StoredTensors, name: str, rows: slice) -> UInt8[np.ndarray, "rows n"]:
    """Some outputs of an array [n, words]."""
    first = rows.start // _PER_WORD
    words: Shaped[np.ndarray, "n words"] = stored.read_stored(
        name, (slice(0, stored.shapes[name][0]), slice(first, -(-rows.stop // _PER_WORD)))
    )
    integers = unpack(np.ascontiguousarray(words), 4).reshape(len(words), -1, _PER_WORD)
    outputs = integers[..., _ORDER].reshape(len(words), -1)
    start = rows.start - first * _PER_WORD
    return outputs[:, start : start + rows.stop - rows.start].T
