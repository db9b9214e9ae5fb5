"""Branches of trees on a draft's devices, and what programs pack of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.devices.branches.packed import PackedBranches
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.records import BranchTokens, BranchTrees
from ssd_jax.sampling.confidence import UNKNOWN


class UnpackedBranches(NamedTuple):
    """What `TreeExpansionPrograms` packs of M branches and, as the last one, of the record.

    Attributes:
      gap_class: of the rows of each tree; -1 where the draft has not run them.
      row, bonus, rank: of the outcomes; see `outcomes.TreeOutcomes`. 0 of the record.
      length, tokens, parents: of the trees.
      ranks: of the nodes among the continuations of their parents.
    """

    gap_class: Int32[np.ndarray, "B M+1 m+1"]
    row: Int32[np.ndarray, "B M+1"]
    bonus: Int32[np.ndarray, "B M+1"]
    rank: Int32[np.ndarray, "B M+1"]
    length: Int32[np.ndarray, "B M+1"]
    tokens: Int32[np.ndarray, "B M+1 m"]
    parents: Int32[np.ndarray, "B M+1 m"]
    ranks: Int32[np.ndarray, "B M+1 m"]


def unpack(packed: Int32[np.ndarray, "B M+1 columns"], nodes: int) -> UnpackedBranches:
    """Takes the columns apart; m is `nodes`."""
    ends = np.cumsum([nodes + 1, 1, 1, 1, 1, nodes, nodes])
    gap_class, row, bonus, rank, length, *trees = np.split(packed, ends, axis=2)
    heads = (array[..., 0] for array in (row, bonus, rank, length))
    return UnpackedBranches(gap_class, *heads, *trees)


class TreeBranches(PackedBranches):
    """Branches with trees on a draft's devices.

    Args:
      packed: the branches after the first forward, as `TreeExpansionPrograms` packs them.
      grow: adds the nodes of a depth to their trees, and returns `packed`.
      shape: of the trees.

    Attributes:
      unpacked: the same, as far as they were read; None before.
    """

    def __init__(
        self, packed: jax.Array, grow: Callable[[int], jax.Array], shape: TreeShape
    ) -> None:
        super().__init__(packed)
        self._grow, self._shape = grow, shape
        self.unpacked: UnpackedBranches | None = None

    @override
    def _grown(self, forwards: int) -> jax.Array | None:
        """A tree has no more than K depths."""
        return self._grow(forwards) if forwards < self._shape.depth else None

    @override
    def _unpacked(
        self, packed: Int32[np.ndarray, "B branches columns"], forwards: int
    ) -> BranchTokens:
        unpacked = self.unpacked = unpack(packed, self._shape.nodes)
        tokens = unpacked.tokens[:, :-1]
        return BranchTokens(
            bonus=unpacked.bonus[:, :-1],
            lengths=unpacked.length[:, :-1],
            tokens=tokens,
            confidence=np.full(tokens.shape, UNKNOWN, np.int32),
            forwards=forwards,
            trees=BranchTrees(unpacked.row[:, :-1], unpacked.parents[:, :-1]),
        )
