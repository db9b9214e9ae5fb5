"""Which pages a role's slots have, as its programs take it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices.passes import PagedPrograms
from ssd_jax.models.sharding import put
from ssd_jax.roles.records import ALL, SlotOpening


class SlotPages:
    """The page table of all slots, kept on the host and copied to the device when it changes."""

    def __init__(self, programs: PagedPrograms) -> None:
        self._host: Int32[np.ndarray, "B P"] | None = programs.any_table()
        self._device: Int32[jax.Array, "B P"] | None = None
        self._told = [(0, ALL)] * programs.slots
        self._programs = programs

    @property
    def table(self) -> Int32[jax.Array, "B P"] | None:
        """On the device, copied only after a change; None where each slot has one page."""
        if self._device is None and self._host is not None:
            # The host's is changed in place later, and a CPU device may share its memory.
            self._device = put(self._host.copy(), self._programs.model.by_slots)
        return self._device

    def open(self, opening: SlotOpening) -> None:
        """Gives a slot the pages of its request. Without an engine, which shares them out, it has
        any."""
        self._told[opening.slot] = opening.reused, opening.prompt
        if opening.pages:
            self.set(opening.slot, opening.pages)

    def set(self, slot: int, pages: Sequence[int]) -> None:
        """Gives a slot these pages; the last one stands in for all behind it, so that nothing
        reaches pages of others."""
        programs = self._programs
        if programs.paging is None or self._host is None:
            return
        # Each group of devices numbers its own pages from 0.
        each = programs.paging.total // programs.model.data_shards
        row, own = self._host[slot], np.array(pages, np.int32) - slot // programs.share * each
        row[:] = own[-1]
        row[: len(own)] = own
        self._device = None

    def of_text(self, slot: int) -> tuple[int, int]:
        """`SlotOpening.reused` and `SlotOpening.prompt` of a slot."""
        return self._told[slot]
