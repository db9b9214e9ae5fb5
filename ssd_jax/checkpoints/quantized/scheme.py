"""What a format of quantised matrices says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float32, UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.blocks import kind_of, pack
from ssd_jax.checkpoints.quantized.groups import GroupLayout, Groups, in_groups
from ssd_jax.checkpoints.weights.grouped import StoredGroups
from ssd_jax.checkpoints.weights.tensors import Index
from ssd_jax.kernels.linear.group_form import GroupForm

MatrixShape = tuple[int, int]
"""Outputs and inputs."""

Shape = tuple[int, ...]
"""Outputs and inputs; experts before them, if a module has a matrix of each."""


class StoredTensors(Protocol):
    """Named arrays of a file, of any type."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Shapes of all arrays, by name."""
        ...

    def read_stored(self, name: str, index: Index = ()) -> np.ndarray:
        """One array as it is stored, or a part of it."""
        ...


class Scheme(ABC):
    """A format of quantised matrices.

    Attributes:
      name: of the type of its matrices, for messages.
      main: what follows a module's name in the name of the array that holds its integers.
      needed: what follows it in names of arrays without which the module is not quantised; of each
        tuple one is enough.
      beside: what follows it in names of further arrays.
      separator: what is between a module's name and these.
    """

    name: ClassVar[str]
    main: ClassVar[str]
    needed: ClassVar[tuple[tuple[str, ...], ...]]
    beside: ClassVar[tuple[str, ...]] = ()
    separator: ClassVar[str] = "."

    @abstractmethod
    def shape(self, stored: StoredTensors, module: str) -> Shape:
        """Shape of a module's matrices, without reading data, except a few bytes of metadata.

        Raises:
          ValueError: the arrays do not fit each other, and why.
        """

    @abstractmethod
    def read_part(
        self, stored: StoredTensors, module: str, part: Index
    ) -> Float32[np.ndarray, "*outputs inputs"]:
        """A part of a module's matrices; each slice has a start and a stop within its axis."""

    def kind(self, stored: StoredTensors, module: str) -> str | None:
        """The kind of `kernels.linear.kinds` that has these integers and scales; None if none has
        them."""
        del stored, module
        return None

    def read_blocks(
        self, stored: StoredTensors, module: str
    ) -> UInt8[np.ndarray, "*outputs row_bytes"]:
        """A module's matrices in blocks of their kind."""
        raise ValueError(f"{module} has no kind")

    def read_expert_blocks(
        self, stored: StoredTensors, module: str, expert: int, rows: slice
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        """Rows of an expert's matrix in blocks of its kind, of a module that has those of all;
        `rows` may have a step."""
        return self.read_blocks(stored, module)[expert, rows]

    def group_form(self, stored: StoredTensors, module: str) -> GroupForm | None:
        """The form of a matrix in groups of inputs, or of those of experts; None if it has none."""
        del stored, module
        return None

    def read_stored_groups(self, stored: StoredTensors, module: str, rows: slice) -> StoredGroups:
        """Rows of a module's matrix, which has a form."""
        raise ValueError(f"{module} is not in groups")

    def read_expert_groups(
        self, stored: StoredTensors, module: str, expert: int, rows: slice
    ) -> StoredGroups:
        """Rows of an expert's matrix, of a module that has those of all, which have a form; `rows`
        may have a step."""
        raise ValueError(f"{module} is not in groups")


class MatrixScheme(Scheme):
    """A format of modules with one matrix each."""

    @abstractmethod
    @override
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape: ...

    @abstractmethod
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        """Rows of a module's matrix; `rows` has a start and a stop within the matrix."""

    @override
    def read_part(
        self, stored: StoredTensors, module: str, part: Index
    ) -> Float32[np.ndarray, "rows columns"]:
        rows, columns = part
        return self.read_rows(stored, module, rows)[:, columns]


class GroupScheme(MatrixScheme):
    """A format of integers in groups."""

    @abstractmethod
    def read_groups(self, stored: StoredTensors, module: str, rows: slice) -> Groups:
        """Rows of a module's matrix."""

    @abstractmethod
    def layout(self, stored: StoredTensors, module: str) -> GroupLayout | None:
        """How a module's matrix is in groups; None if these are not of inputs that follow each
        other."""

    @override
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        return self.read_groups(stored, module, rows).values()

    @override
    def read_blocks(
        self, stored: StoredTensors, module: str
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        rows = slice(0, self.shape(stored, module)[0])
        return pack(self.kind(stored, module), self.read_groups(stored, module, rows))

    @override
    def kind(self, stored: StoredTensors, module: str) -> str | None:
        layout = self.layout(stored, module)
        return layout and kind_of(layout.bits, layout.group, symmetric=layout.symmetric)

    @override
    def group_form(self, stored: StoredTensors, module: str) -> GroupForm | None:
        layout = self.layout(stored, module)
        if layout is None:
            return None
        dtype = "int8" if layout.bits > 4 else "int4"
        return GroupForm(dtype, layout.group, minima=not layout.symmetric)

    @override
    def read_stored_groups(self, stored: StoredTensors, module: str, rows: slice) -> StoredGroups:
        layout = self.layout(stored, module)
        assert layout is not None
        return in_groups(layout, self.read_groups(stored, module, rows))
