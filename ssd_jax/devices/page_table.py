"""Which pages a role's slots have, as its programs take it."""

from __future__ import annotations

import numpy as np
from jaxtyping import Int32

from ssd_jax.devices.passes import PagedPrograms
from ssd_jax.roles.records import SlotOpening


class SlotPages:
    """The page table of all slots, changed as requests enter them.

    Attributes:
      table: None where each slot has one page.
      reused: see `SlotOpening.reused`, of each slot.
    """

    def __init__(self, programs: PagedPrograms) -> None:
        self.table: Int32[np.ndarray, "B P"] | None = programs.any_table()
        self.reused = [0] * programs.slots
        self._programs = programs

    def open(self, opening: SlotOpening) -> None:
        """Gives a slot the pages of its request; the last one stands in for all behind it, so that
        nothing reaches pages of others. Without an engine, which shares them out, it has any."""
        programs = self._programs
        self.reused[opening.slot] = opening.reused
        if programs.paging is None or self.table is None or not opening.pages:
            return
        # A program on its way may still read the old one.
        self.table = self.table.copy()
        row, pages = self.table[opening.slot], np.array(opening.pages, np.int32)
        # Each group of devices numbers its own pages from 0.
        each = programs.paging.total // programs.model.data_shards
        row[:] = pages[-1] - opening.slot // programs.share * each
        row[: len(pages)] = pages - opening.slot // programs.share * each
