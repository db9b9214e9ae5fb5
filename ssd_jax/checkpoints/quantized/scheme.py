"""What a format of quantised matrices says of itself."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float32, UInt8
from typing_extensions import override

from ssd_jax.checkpoints.quantized.blocks import pack
from ssd_jax.checkpoints.quantized.groups import Groups
from ssd_jax.checkpoints.tensors import Index

MatrixShape = tuple[int, int]
"""Outputs and inputs."""


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
    """

    name: ClassVar[str]
    main: ClassVar[str]
    needed: ClassVar[tuple[tuple[str, ...], ...]]
    beside: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def shape(self, stored: StoredTensors, module: str) -> MatrixShape:
        """Shape of a module's matrix, without reading data, except a few bytes of metadata.

        Raises:
          ValueError: the arrays do not fit each other, and why.
        """

    @abstractmethod
    def read_rows(
        self, stored: StoredTensors, module: str, rows: slice
    ) -> Float32[np.ndarray, "rows inputs"]:
        """Rows of a module's matrix; `rows` has a start and a stop within the matrix."""

    def kind(self, stored: StoredTensors, module: str) -> str | None:
        """The kind of `kernels.linear.kinds` that has these integers and scales; None if none has
        them."""
        del stored, module
        return None

    def read_blocks(
        self, stored: StoredTensors, module: str
    ) -> UInt8[np.ndarray, "outputs row_bytes"]:
        """A module's matrix in blocks of its kind."""
        raise ValueError(f"{module} has no kind")


class GroupScheme(Scheme):
    """A format of integers in groups."""

    @abstractmethod
    def read_groups(self, stored: StoredTensors, module: str, rows: slice) -> Groups:
        """Rows of a module's matrix."""

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
