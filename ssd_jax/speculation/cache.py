"""The speculation cache: branches prepared for the outcomes of the verifications under way.

A verification has the outcome (k, t*): it keeps s_1..s_k of its record and draws t* behind them. Of
a tree it is (row, t*): the path to a row, and t* behind it.
Each branch is prepared for one outcome; if it comes true, the branch's tokens are the next
proposal. One look-up serves all rows of a batch. Pure host code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Int, Shaped

from ssd_jax.roles.protocols import ExpansionAnswer
from ssd_jax.roles.records import Absence, BranchTokens, CacheLookup

MissCause = Literal["miss", "cold"] | Absence
"""Why there is no branch: none was prepared for the outcome, none at all, or the draft is away."""


class SpeculationCache:
    """Branches of B rows, numbered by k, then by rank; of trees by their likelihood.

    Of several branches for the same outcome the lowest one counts: a choice by their tokens would
    bias them.

    Attributes:
      branches: as far as they have come; None is none.
      forwards: number that will make them.
      absence: why there are none, though they were asked for.
    """

    def __init__(self) -> None:
        self.branches: BranchTokens | None = None
        self.forwards = 0
        self.absence: Absence | None = None
        self._ends: list[list[int]] = []  # of the branches of each k, by row
        self._answer: ExpansionAnswer | None = None
        self._expanded: frozenset[int] = frozenset()  # rows whose branches were asked for

    def prepare(
        self,
        counts: Int[np.ndarray, "B F"],
        answer: ExpansionAnswer | None = None,
        forwards: int = 0,
    ) -> None:
        """Starts over with branches of fan-outs F, which `answer` will bring."""
        self.drop()
        self._ends, self._answer, self.forwards = counts.cumsum(axis=1).tolist(), answer, forwards
        self._expanded = frozenset(np.flatnonzero(counts.any(axis=1)).tolist())

    def drop(self) -> None:
        """The records have no branches any more."""
        self.branches = self.absence = self._answer = None
        self._expanded = frozenset()

    def forget(self, row: int) -> None:
        """A row has another request, whose branches were not asked for."""
        self._expanded -= {row}

    def gather(self, forwards: int, until: Callable[[], bool] | None = None) -> None:
        """Takes branches of so many forwards; see `ExpansionAnswer.branches`."""
        if self._answer is None or not self._expanded:
            return
        answer = self._answer.branches(forwards, until)
        if isinstance(answer, str):
            self.absence = answer
        elif answer is not None and answer is not self.branches:
            self.absence, self.branches = None, answer

    def miss_cause(self, row: int) -> MissCause:
        """Why a row has no branch."""
        if row not in self._expanded:
            return "cold"
        if self.absence is not None or self.branches is None:
            return self.absence or "cold"
        has_any = bool((self.branches.bonus[row] >= 0).any())
        return self.branches.absent.get(row) or ("miss" if has_any else "cold")

    def look_up(self, k: Sequence[int], bonus: Sequence[int]) -> CacheLookup:
        """Finds the branches of B outcomes: k accepted tokens (-1: none), then `bonus`.

        Of trees, k is the row that the last accepted token is at.
        """
        # Loops over rows: after a forward of the target, with cold caches, they take half the time
        # of operations on [B, M].
        rows = [(-1, accepted, 0, -1) for accepted in k]
        lengths, bonuses, node = np.zeros((len(k), 0), np.int32), None, None
        if self.branches is not None:
            lengths, bonuses = self.branches.lengths, self.branches.bonus
            node = None if self.branches.trees is None else self.branches.trees.node
            for row, (accepted, token) in enumerate(zip(k, bonus, strict=True)):
                if accepted >= 0:
                    nodes = None if node is None else node[row].tolist()
                    rows[row] = self._find(bonuses[row], nodes, row, accepted, token)
        branch, of_k, prepared, rank = np.array(rows, np.int32).T.copy()
        ends = self._ends if node is None else ()
        return CacheLookup(branch, of_k, prepared, rank, lengths, bonuses, ends, node)

    def _find(
        self,
        bonus: Shaped[np.ndarray, "M"],
        nodes: Sequence[int] | None,
        row: int,
        k: int,
        token: int,
    ) -> tuple[int, int, int, int]:
        """A row of `CacheLookup`."""
        if nodes is None:
            ends = self._ends[row]
            of_k = range(ends[k - 1] if k else 0, ends[k])
            tokens = bonus[of_k.start : of_k.stop].tolist()
        else:
            of_k = [branch for branch, node in enumerate(nodes) if node == k]
            tokens = bonus[of_k].tolist()
        prepared = len(tokens) - tokens.count(-1)
        if token not in tokens:
            return -1, k, prepared, -1
        rank = tokens.index(token)
        return of_k[rank], k, prepared, rank
