"""How several draft workers share the work of one, and which split is predicted to be fastest."""

from __future__ import annotations

from typing import Literal, NamedTuple

from ssd_jax.speculation.division import share

Split = Literal["auto", "slots", "branches"]

WEIGHTS = 16
"""Rows of a draft's forward that take about as long as its weights. The predicted time of a forward
counts both, since rows dominate on a processor and weights on an accelerator."""


class Layout(NamedTuple):
    """Workers in groups: each group has some of the slots, and each of its workers some of their
    branches."""

    groups: int = 1
    parts: int = 1

    @property
    def workers(self) -> int:
        """Number of workers."""
        return self.groups * self.parts

    def slots_per_worker(self, slots: int) -> int:
        """Slots of a worker."""
        return -(-slots // self.groups)

    def branches_per_worker(self, branches: int) -> int:
        """Branches that a worker needs room for."""
        return share(branches, self.parts)

    def cost(self, slots: int, branches: int, k: int, width: int = 1) -> int:
        """Predicted time of a round's speculation with all slots busy, in rows of a forward.

        It counts K forwards of all branches, and one of the record's tokens where workers follow
        a record that another has made.

        Args:
          width: rows that a branch has in a forward.
        """
        rows, follows = self.slots_per_worker(slots), self.parts > 1
        forwards = k * (WEIGHTS + rows * width * self.branches_per_worker(branches))
        return forwards + follows * (WEIGHTS + rows * k)

    def __str__(self) -> str:
        counts = {"slots": self.groups, "branches": self.parts}
        dimensions = " and ".join(dimension for dimension, count in counts.items() if count > 1)
        return f"{self.workers} workers that share {dimensions}" if dimensions else "one worker"


def choose(
    workers: int, split: Split, *, slots: int, branches: int, k: int, width: int = 1
) -> Layout:
    """How `workers` share B slots with M branches: as the user says, or by the least cost.

    Args:
      width: rows that a branch has in a forward; those of its tree.
    """
    if split != "auto":
        return Layout(workers, 1) if split == "slots" else Layout(1, workers)
    layouts = [Layout(n, workers // n) for n in range(workers, 0, -1) if workers % n == 0]
    return min(layouts, key=lambda layout: layout.cost(slots, branches, k, width))
