"""Several draft workers that share the work of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from ssd_jax.placement.parallel.by_branches import DraftByBranches
from ssd_jax.placement.parallel.by_slots import DraftBySlots
from ssd_jax.placement.parallel.layout import Layout
from ssd_jax.placement.parallel.part import Part
from ssd_jax.placement.process.placement import DraftWorker


class DraftWorkers:
    """Workers that share the work of one `DraftWorker`.

    Args:
      workers: ordered by groups, as many as the layout has.
      slots: B, over all groups.
    """

    def __init__(self, workers: Sequence[DraftWorker], layout: Layout, slots: int) -> None:
        self.workers = tuple(workers)
        self._layout, self._slots = layout, slots

    def start(self) -> None:
        """Starts loading in all; returns at once."""
        for worker in self.workers:
            worker.start()

    def wait_ready(self) -> None:
        """Waits until all workers serve. Raises: InputError: one cannot."""
        for worker in self.workers:
            worker.wait_ready()

    def check(self) -> None:
        """Raises: InputError: a worker could not start. Does not wait."""
        for worker in self.workers:
            worker.check()

    def draft(self, patience: float | None = None) -> Part:
        """A draft with empty slots, over a stream to each worker, as `DraftWorker.draft`."""
        drafts: list[Part] = []
        try:
            for worker in self.workers:
                drafts.append(worker.draft(patience))
        except BaseException:
            for part in drafts:
                part.close()
            raise
        parts = self._layout.parts
        groups: list[Part] = drafts
        if parts > 1:
            groups = [
                DraftByBranches(drafts[begin : begin + parts])
                for begin in range(0, len(drafts), parts)
            ]
        return DraftBySlots(groups, self._slots) if len(groups) > 1 else groups[0]

    def end_last(self) -> None:
        """Ends the draft made last; its figures are dropped."""
        for worker in self.workers:
            worker.end_last()

    @property
    def counters(self) -> Counter[str]:
        """Sums of `DraftWorker.counters` over the workers."""
        return sum((worker.counters for worker in self.workers), Counter())

    def close(self) -> None:
        """Ends all workers."""
        for worker in self.workers:
            worker.close()
