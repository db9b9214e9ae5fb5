"""The speculation cache: branches prepared for the outcomes of the verifications under way.

A verification has the outcome (k, t*): it keeps s_1..s_k of its record and draws t* behind them.
Each branch is prepared for one outcome; if it comes true, the branch's tokens are the next
proposal. One look-up serves all rows of a batch. Pure host code.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Int, Shaped

from ssd_jax.roles.records import Absence, BranchTokens, CacheLookup


class SpeculationCache:
    """Branches of B rows, numbered by k, then by rank.

    Of several branches for the same outcome the lowest one counts: a choice by their tokens would
    bias them.

    Attributes:
      branches: as far as they have come; None is none. The caller that waits for them sets it.
    """

    def __init__(self) -> None:
        self._ends: list[list[int]] = []  # of the branches of each k, by row
        self.branches: BranchTokens | None = None

    def prepare(self, counts: Int[np.ndarray, "B F"]) -> None:
        """Starts over with branches of fan-outs F that have no tokens yet."""
        self._ends = counts.cumsum(axis=1).tolist()
        self.branches = None

    def held(self, row: int) -> bool:
        """Whether a row has any branch."""
        return self.branches is not None and bool((self.branches.bonus[row] >= 0).any())

    def absent(self, row: int) -> Absence | None:
        """Why a row has no branches, where its draft did not answer and others did."""
        return None if self.branches is None else self.branches.absent.get(row)

    def look_up(self, k: Sequence[int], bonus: Sequence[int]) -> CacheLookup:
        """Finds the branches of B outcomes: k accepted tokens (-1: none), then `bonus`."""
        # Loops over rows: after a forward of the target, with cold caches, they take half the time
        # of operations on [B, M].
        found = [(-1, accepted, 0, -1) for accepted in k]
        lengths, bonuses = np.zeros((len(k), 0), np.int32), None
        if self.branches is not None:
            lengths, bonuses = self.branches.lengths, self.branches.bonus
            for row, (accepted, token) in enumerate(zip(k, bonus, strict=True)):
                if accepted >= 0:
                    found[row] = self._find(self.branches.bonus[row], row, accepted, token)
        branch, of_k, prepared, rank = np.array(found, np.int32).T.copy()
        return CacheLookup(branch, of_k, prepared, rank, lengths, bonuses, self._ends)

    def _find(
        self, bonus: Shaped[np.ndarray, "M"], row: int, k: int, token: int
    ) -> tuple[int, int, int, int]:
        """A row of `CacheLookup`."""
        ends = self._ends[row]
        begin = ends[k - 1] if k else 0
        tokens = bonus[begin : ends[k]].tolist()
        prepared = len(tokens) - tokens.count(-1)
        if token not in tokens:
            return -1, k, prepared, -1
        rank = tokens.index(token)
        return begin + rank, k, prepared, rank
