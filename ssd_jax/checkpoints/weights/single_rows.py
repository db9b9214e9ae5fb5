"""Tensors of one row, which files have as vectors or as matrices."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from typing_extensions import override

from ssd_jax.checkpoints.weights.tensors import ForwardedTensors, Index, TensorSource


class SingleRows(ForwardedTensors):
    """The tensors, of which some of one row get the number of axes that the decoder has them with.

    Args:
      axes: that number, by the end of a name behind its layer. Tensors of several rows keep theirs.
    """

    def __init__(self, stored: TensorSource, axes: Mapping[str, int]) -> None:
        super().__init__(stored)
        self._vectors: set[str] = set()  # stored as matrices
        self._matrices: set[str] = set()  # stored as vectors
        for name, shape in stored.shapes.items():
            wanted = next((count for end, count in axes.items() if name.endswith(f".{end}")), None)
            if wanted == 1 and len(shape) == 2 and shape[0] == 1:
                self._vectors.add(name)
            elif wanted == 2 and len(shape) == 1:
                self._matrices.add(name)
        self.shapes = {name: self._with_axes(name, shape) for name, shape in stored.shapes.items()}

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._with_axes(name, super().shape(name))

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        if name in self._vectors:
            return super().read_part(name, (slice(0, 1), *part))[0]
        if name in self._matrices:
            row, *columns = part
            return super().read_part(name, tuple(columns))[None][row]
        return super().read_part(name, part)

    def _with_axes(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        if name in self._vectors:
            return shape[1:]
        return (1, *shape) if name in self._matrices else shape
