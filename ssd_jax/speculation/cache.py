"""The speculation cache: branches prepared for the outcomes of the verifications under way.

A verification has the outcome (k, t*): it keeps s_1..s_k of its record and draws t* behind them. A
branch was prepared for one outcome, and its tokens are what is proposed next if that comes true.
One look-up serves all rows of a batch. Pure host code over arrays.
"""

from __future__ import annotations

import numpy as np

from ssd_jax.roles.records import BranchTokens, CacheLookup
from ssd_jax.speculation.forks import Forks, forks


class SpeculationCache:
    """Branches of B rows, M of each. Of branches for the same outcome the lowest one counts: to
    look at their tokens would bias them.

    Attributes:
      branches: as far as they have come; None is none.
    """

    def __init__(self, slots: int, branches: int) -> None:
        self._nothing = Forks(*(np.full((slots, branches), -1, np.int32) for _ in range(2)))
        self._forks = self._nothing
        self.branches: BranchTokens | None = None

    def prepare(self, counts: np.ndarray) -> None:
        """Begins anew, with branches of fan-outs F [B, K + 1] that have no tokens yet."""
        self._forks = forks(counts, self._nothing.k.shape[1])
        self.branches = None

    def fill(self, branches: BranchTokens) -> None:
        """Takes what the branches have speculated so far."""
        self.branches = branches

    def clear(self) -> None:
        """Holds no branch."""
        self._forks, self.branches = self._nothing, None

    def held(self) -> np.ndarray:
        """Whether there is any branch, [B] bool."""
        return np.asarray(self._there().any(axis=1))

    def look_up(self, k: np.ndarray, bonus: np.ndarray) -> CacheLookup:
        """Finds the branches of outcomes: k [B] accepted tokens (-1: none), then `bonus` [B]."""
        rows = len(k)
        branch, rank = (np.full(rows, -1, np.int32) for _ in range(2))
        there = self._there()
        row, place = np.nonzero(there & (self._forks.k == k[:, None]) & (k >= 0)[:, None])
        wasted = np.zeros(rows, np.int32)
        if self.branches is not None:
            match = (self.branches.bonus[row, place] == bonus[row]).astype(bool)
            for array, found in ((branch, place), (rank, self._forks.rank[row, place])):
                array[row[match][::-1]] = found[match][::-1]  # the first one comes last
            wasted = (self.branches.lengths * there).sum(axis=1, dtype=np.int32)
        prepared = np.bincount(row, minlength=rows).astype(np.int32)
        return CacheLookup(branch, k, prepared, rank, wasted)

    def _there(self) -> np.ndarray:
        if self.branches is None:
            return np.zeros_like(self._forks.k, bool)
        return np.asarray((self._forks.k >= 0) & (self.branches.bonus >= 0), bool)
