"""The interface to weights that every checkpoint format implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping

import numpy as np
from jaxtyping import UInt8
from typing_extensions import override

from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.kernels.linear.group_form import GroupForm

Index = tuple[slice, ...]
"""One slice an axis, from the first; missing axes are whole. Steps are 1, bounds not negative."""

Progress = Callable[[int, int], None]
"""Called with (bytes done, total bytes), growing, never by two threads at once."""


class TensorSource(ABC):
    """Named arrays that are read on demand.

    Names are Hugging Face's (`model.layers.0.self_attn.q_proj.weight`, `lm_head.weight`),
    matrices are [out, in], and q/k rows are laid out for half-rotation RoPE, whatever the file
    does. Reading from several threads at once is safe.

    Attributes:
      shapes: shapes of all tensors of the checkpoint, by name.
    """

    shapes: Mapping[str, tuple[int, ...]]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of one tensor, without reading it.

        Raises:
          InputError: the tensor is stored in a type that cannot be read.
        """
        return self.shapes[name]

    def read(self, name: str, index: Index | None = None) -> np.ndarray:
        """One tensor, or the part that `index` selects, in a floating type.

        The array owns its memory: it is never a view of a mapped file.
        """
        return self.read_part(name, bounds(index, self.shape(name)))

    def stored_type(self, name: str) -> str | None:
        """ggml's name of the storage type of a tensor in a GGUF file; of a quantised checkpoint see
        `QuantizedTensors`; None for other formats."""
        return None

    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        """A matrix with a stored type, or those of experts, as in its file: ggml's blocks, row by
        row.

        The array may be a view of the file and must not be written to.
        """
        raise ValueError(f"{name} has no stored blocks")

    def read_expert_blocks(
        self, name: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        """Rows of an expert's matrix as `read_blocks` gives them, of a tensor with those of all;
        `rows` has a start and a stop within the matrix, and may have a step."""
        return self.read_blocks(name)[expert, rows]

    def group_form(self, name: str) -> GroupForm | None:
        """The form of a matrix in groups of inputs, or of those of experts; None if it has none."""
        del name
        return None

    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        """Rows of a matrix, which has a form; `rows` has a start and a stop within the matrix."""
        raise ValueError(f"{name} is not in groups")

    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        """Rows of an expert's matrix, of a tensor with those of all, which has a form. `rows` has a
        start and a stop within the matrix, and may have a step."""
        raise ValueError(f"{name} is not in groups")

    @abstractmethod
    def read_part(self, name: str, part: Index) -> np.ndarray:
        """What `read` returns; `part` has a start and a stop for every axis."""


class ForwardedTensors(TensorSource):
    """The tensors of another source, under names that it may have otherwise."""

    def __init__(self, stored: TensorSource) -> None:
        self._stored = stored
        self.shapes = stored.shapes

    def stored_name(self, name: str) -> str:
        """The other source's name of a tensor."""
        return name

    @override
    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored.shape(self.stored_name(name))

    @override
    def read_part(self, name: str, part: Index) -> np.ndarray:
        return self._stored.read_part(self.stored_name(name), part)

    @override
    def stored_type(self, name: str) -> str | None:
        return self._stored.stored_type(self.stored_name(name))

    @override
    def group_form(self, name: str) -> GroupForm | None:
        return self._stored.group_form(self.stored_name(name))

    @override
    def read_groups(self, name: str, rows: slice) -> StoredGroups:
        return self._stored.read_groups(self.stored_name(name), rows)

    @override
    def read_expert_groups(self, name: str, expert: int, rows: slice) -> StoredGroups:
        return self._stored.read_expert_groups(self.stored_name(name), expert, rows)

    @override
    def read_blocks(self, name: str) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        return self._stored.read_blocks(self.stored_name(name))

    @override
    def read_expert_blocks(
        self, name: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        return self._stored.read_expert_blocks(self.stored_name(name), expert, rows)


def bounds(index: Index | None, shape: tuple[int, ...]) -> tuple[slice, ...]:
    """`index` with a start and a stop for every axis of `shape`.

    Raises:
      ValueError: a step is not 1, or there are more slices than axes.
    """
    slices = index or ()
    if len(slices) > len(shape):
        raise ValueError(f"{len(slices)} slices for an array of shape {shape}")
    complete = []
    for axis, size in zip(slices + (slice(None),) * (len(shape) - len(slices)), shape, strict=True):
        start, stop, step = axis.indices(size)
        if step != 1:
            raise ValueError(f"slice {axis} has a step; only 1 is read")
        complete.append(slice(start, max(start, stop)))
    return tuple(complete)
