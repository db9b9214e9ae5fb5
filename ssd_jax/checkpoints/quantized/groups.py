"""Integers in groups that share a scale."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Shaped, UInt8

from ssd_jax.checkpoints.weights.grouped import StoredGroups


class GroupLayout(NamedTuple):
    """How a matrix is in groups of inputs that follow each other.

    Attributes:
      bits: of an integer.
      group: inputs of a group.
      symmetric: whether all zeros are half of the range.
    """

    bits: int
    group: int
    symmetric: bool


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


def in_groups(layout: GroupLayout, groups: Groups) -> StoredGroups:
    """The integers less half of their range, with minima where zeros are not that.

    Raises:
      ValueError: zeros are not as the layout says.
    """
    half = 1 << (layout.bits - 1)
    scales, zeros = (part.astype(np.float32) for part in (groups.scales, groups.zeros))
    if layout.symmetric and (zeros != half).any():
        raise ValueError("the zeros are not half of the range, as the configuration says")
    values = (groups.integers.astype(np.int16) - half).astype(np.int8)
    minima = None if layout.symmetric else (half - zeros) * scales
    return StoredGroups(values, scales, minima)


def unpack(words: Shaped[np.ndarray, "*rows words"], bits: int) -> UInt8[np.ndarray, "*rows _"]:
    """The integers of 32-bit words, those in lower bits first."""
    shifts = np.arange(0, 32, bits, dtype=np.uint32)
    integers = (words.view(np.uint32)[..., None] >> shifts) & np.uint32((1 << bits) - 1)
    return integers.astype(np.uint8).reshape(*words.shape[:-1], words.shape[-1] * len(shifts))


def contiguous_groups(inputs: int, size: int) -> Shaped[np.ndarray, "inputs"]:
    """`Groups.group_of_input` of groups of inputs that follow each other."""
    return np.arange(inputs) // size


def check_groups(order: np.ndarray, inputs: int, groups: int) -> None:
    """Checks a stored `Groups.group_of_input`.

    Raises:
      ValueError: it does not give one of the groups to each input.
    """
    if order.shape != (inputs,) or order.min() < 0 or order.max() >= groups:
        raise ValueError(f"g_idx does not give a group of {groups} to {inputs} inputs")
