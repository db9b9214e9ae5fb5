"""How often the target's token has each rank in a draft's order: what token trees are shaped by.

Pure host code. A node's continuations are ranked by the draft, and the gap between its best two
scores says how sure it is. A tree shows the ranks of a node that are its children: whether the
target took one of them is known of every node that the target's text came through.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64

from ssd_jax.roles.drafting import GAP_CLASSES, TreeShape

_FIRST = (0.33, 0.41, 0.5, 0.58, 0.68, 0.8, 0.91, 0.97)
"""Share of the best token by class, before anything is known."""
_OTHERS = (0.4, 0.2, 0.12, 0.08, 0.05)
"""Shares of the next ranks in what the best leaves; those beyond halve."""
_WEIGHT = 24.0  # visits that a guess is worth
_DEPTH_WEIGHT = 96.0  # that the rate of all depths together is worth at a depth


class Visit(NamedTuple):
    """A node that the target's text came through.

    Attributes:
      gap_class: of its continuations.
      children: ranks of its children, ascending.
      taken: rank of the child that was the target's token; None if none was.
    """

    gap_class: int
    children: Sequence[int]
    taken: int | None


def path_visits(
    parents: Sequence[int], ranks: Sequence[int], classes: Sequence[int], last: int
) -> list[Visit]:
    """The visits of a verification that ended at row `last`, from the pending token on.

    Args:
      parents: of the nodes, as `sampling.topology` has them.
      ranks: of the nodes; -1 where there is no node.
      classes: of the rows; -1 where the draft does not know the continuations.
    """
    visits: list[Visit] = []
    taken = None
    row = last
    while True:
        children = [
            rank for parent, rank in zip(parents, ranks, strict=True) if parent == row and rank >= 0
        ]
        if classes[row] >= 0:
            visits.insert(0, Visit(classes[row], sorted(children), taken))
        if row == 0:
            return visits
        taken, row = ranks[row - 1], parents[row - 1]


class RankCounts(NamedTuple):
    """Nodes that the target's text came through, of greedy and of sampled rows apart.

    Attributes:
      taken: that the target's token was the child of this rank.
      visited: that they had a child of this rank.
    """

    taken: Float64[np.ndarray, "*rows classes ranks"]
    visited: Float64[np.ndarray, "*rows classes ranks"]

    @classmethod
    def none(cls, ranks: int) -> RankCounts:
        """Nothing was counted."""
        return cls(np.zeros((2, GAP_CLASSES, ranks)), np.zeros((2, GAP_CLASSES, ranks)))

    def plus(self, others: RankCounts) -> RankCounts:
        """These and others."""
        return RankCounts(self.taken + others.taken, self.visited + others.visited)

    def recent(self, most: int) -> RankCounts:
        """The same shares from no more than `most` nodes."""
        factor = min(1.0, most / max(self.visited[..., 0].sum(), 1.0))
        return RankCounts(self.taken * factor, self.visited * factor)


class RankRates:
    """Rates of (depth, class of the gap, rank), of greedy and of sampled rows apart.

    With ancestors a tree's deepest nodes have continuations, too: the bonus tokens of branches.
    Shapes of trees do not change the text where trees are allowed, so that all requests share them.

    Args:
      shape: of the trees.
      earlier: what was counted at earlier starts, of trees with as many ranks.
    """

    def __init__(self, shape: TreeShape, earlier: RankCounts | None = None) -> None:
        sizes = 2, shape.depth + (shape.ancestors > 0), GAP_CLASSES, shape.ranks
        self._taken, self._visited = np.zeros(sizes), np.zeros(sizes)
        self._earlier = RankCounts.none(shape.ranks) if earlier is None else earlier
        others = [*_OTHERS, *(_OTHERS[-1] / 2**i for i in range(1, shape.ranks))]
        first = np.array(_FIRST)[:, None]
        shares = (1 - first) * np.array(others[: shape.ranks - 1])
        self._guess = np.concatenate([first, shares], axis=1)
        self._tables: Float32[np.ndarray, "2 depths classes ranks"] | None = None

    @property
    def counts(self) -> RankCounts:
        """What was counted since the start."""
        return RankCounts(self._taken.sum(axis=1), self._visited.sum(axis=1))

    @property
    def by_class(self) -> Float64[np.ndarray, "classes ranks"]:
        """The rates of greedy and sampled rows and of all depths together."""
        counts = self._earlier.plus(self.counts)
        return self._rates(RankCounts(*(array.sum(axis=0) for array in counts)))

    def observe(self, visits: Sequence[Visit], *, hot: bool) -> None:
        """Counts the visits of a verification, from the pending token on."""
        for depth, (gap_class, children, taken) in enumerate(visits):
            self._visited[int(hot), depth, gap_class, list(children)] += 1
            if taken is not None:
                self._taken[int(hot), depth, gap_class, taken] += 1
        self._tables = None

    def tables(self, hot: Bool[np.ndarray, "B"]) -> Float32[np.ndarray, "B depths classes ranks"]:
        """The rates of each row: depth 0 is of the pending token's continuations."""
        tables = self._tables
        if tables is None:
            rates = self._rates(self._earlier.plus(self.counts))
            at_depth = self._taken + _DEPTH_WEIGHT * rates[:, None]
            tables = (at_depth / (self._visited + _DEPTH_WEIGHT)).astype(np.float32)
            self._tables = tables
        return tables[hot.astype(int)]

    def _rates(self, counts: RankCounts) -> Float64[np.ndarray, "*rows classes ranks"]:
        return (counts.taken + _WEIGHT * self._guess) / (counts.visited + _WEIGHT)
