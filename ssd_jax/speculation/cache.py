"""The speculation cache: branches prepared for the outcomes of the verifications under way.

A verification has the outcome (k, t*): it keeps s_1..s_k of its record and draws t* behind them. A
branch was prepared for one outcome, and its tokens are what is proposed next if that comes true.
One look-up serves all rows of a batch. Pure host code.
"""

from __future__ import annotations

import numpy as np

from ssd_jax.roles.records import BranchTokens, CacheLookup


class SpeculationCache:
    """Branches of B rows, numbered by k, then by rank. Of branches for the same outcome the lowest
    one counts: to look at their tokens would bias them.

    Attributes:
      branches: as far as they have come; None is none.
    """

    def __init__(self) -> None:
        self._ends: list[list[int]] = []  # of the branches of each k, by row
        self.branches: BranchTokens | None = None

    def prepare(self, counts: np.ndarray) -> None:
        """Begins anew, with branches of fan-outs F [B, K + 1] that have no tokens yet."""
        self._ends = counts.cumsum(axis=1).tolist()
        self.branches = None

    def fill(self, branches: BranchTokens) -> None:
        """Takes what the branches have speculated so far."""
        self.branches = branches

    def clear(self) -> None:
        """Holds no branch."""
        self.branches = None

    def held(self, row: int) -> bool:
        """Whether a row has any branch."""
        return self.branches is not None and bool((self.branches.bonus[row] >= 0).any())

    def look_up(self, k: np.ndarray, bonus: np.ndarray) -> CacheLookup:
        """Finds the branches of outcomes: k [B] accepted tokens (-1: none), then `bonus` [B]."""
        # Loops over rows: behind a forward of the target, with cold caches, they take half the time
        # of operations on [B, M].
        lookup = CacheLookup.nothing(k)
        if self.branches is None:
            return lookup
        for row, accepted in enumerate(k.tolist()):
            if accepted < 0:
                continue
            ends = self._ends[row]
            begin = ends[accepted - 1] if accepted else 0
            tokens = self.branches.bonus[row, begin : ends[accepted]].tolist()
            lookup.prepared[row] = len(tokens) - tokens.count(-1)
            if bonus[row] in tokens:
                rank = lookup.rank[row] = tokens.index(bonus[row])
                lookup.branch[row] = begin + rank
        return lookup._replace(wasted=self.branches.lengths.sum(axis=1, dtype=np.int32))
