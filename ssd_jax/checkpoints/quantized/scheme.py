"""What a format of quantised matrices says of itself."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, Protocol

import numpy as np
from jaxtyping import Float32, Shaped, UInt8
from typing_extensions import override

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


@dataclasses.dataclass(frozen=True)
class Groups:
    """Rows of a matrix of integers, of which those of a group of inputs share a scale.

    A value is (integer - zero) * scale.

    Attributes:
      integers: not negative.
      scales: of a row's groups.
      zeros: of a row's groups.
      group_of_input: number of an input's group.
    """

    integers: UInt8[np.ndarray, "rows inputs"]
    scales: Shaped[np.ndarray, "rows groups"]
    zeros: Shaped[np.ndarray, "rows groups"]
    group_of_input: Shaped[np.ndarray, "inputs"]

    def values(self) -> Float32[np.ndarray, "rows inputs"]:
        """The values."""
        zeros = self.zeros.astype(np.float32)[:, self.group_of_input]
        scales = self.scales.astype(np.float32)[:, self.group_of_input]
        return (self.integers.astype(np.float32) - zeros) * scales


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


def unpack(words: Shaped[np.ndarray, "*rows words"], bits: int) -> UInt8[np.ndarray, "*rows _"]:
    """The integers of 32-bit words, those in lower bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    integers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return integers.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


def contiguous_groups(inputs: int, size: int) -> Shaped[np.ndarray, "inputs"]:
    """`Groups.group_of_input` of groups of inputs that follow each other."""
    return np.arange(inputs) // size
