"""Common base of the roles on devices: slots, their pages and their settings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices.programs import device
from ssd_jax.devices.programs.paged import PagedPrograms
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.models.functional import Parameters
from ssd_jax.models.sharding import put
from ssd_jax.roles.records import ALL, SlotOpening


class PagedRole:
    """Keys and values, histories, page table and sampling settings of slots.

    Args:
      programs, parameters: of the role's model.
      temperature: of sampled requests; None uses each request's own.
    """

    def __init__(
        self, programs: PagedPrograms, parameters: Parameters, temperature: float | None = None
    ) -> None:
        self.slots = programs.slots
        self._paged = programs
        self._parameters = list(parameters)
        self._temperature = temperature
        self._pages = programs.new_pages()
        self._history = programs.new_history()
        model = programs.model
        self._rows = SamplingRows(self.slots, model.config.vocab_size, model.slot_sharding)
        self._host_table: Int32[np.ndarray, "B P"] | None = programs.any_table()
        self._device_table: Int32[jax.Array, "B P"] | None = None
        self._openings = [(0, ALL)] * self.slots  # `SlotOpening.reused` and `prompt`

    def open(self, opening: SlotOpening) -> None:
        """Sets a slot's sampling, and its pages if the opening gives any.

        The engine assigns pages; without an engine a slot may have any.
        """
        self._rows.set(opening, self._temperature)
        self._openings[opening.slot] = opening.reused, opening.prompt
        if opening.pages:
            self.set_pages(opening.slot, opening.pages)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Sets all pages of a slot.

        The last page fills the rest of the table's row, so that nothing reaches pages of others.
        """
        programs = self._paged
        if programs.paging is None or self._host_table is None:
            return
        # Each group of devices numbers its own pages from 0.
        pages_per_group = programs.paging.total // programs.model.data_shards
        row = self._host_table[slot]
        local_pages = np.array(pages, np.int32) - slot // programs.local_slots * pages_per_group
        row[:] = local_pages[-1]
        row[: len(local_pages)] = local_pages
        self._device_table = None

    @property
    def _table(self) -> Int32[jax.Array, "B P"] | None:
        """The table on the device, copied only after a change; None if each slot has one page."""
        if self._device_table is None and self._host_table is not None:
            # The host's table is changed in place later, and a CPU device may share its memory.
            self._device_table = put(self._host_table.copy(), self._paged.model.slot_sharding)
        return self._device_table

    def _text(self) -> tuple[Any, Any, Any, Any]:
        """First arguments of the programs."""
        return self._parameters, self._pages, self._history, self._table

    def _run_prefill(
        self, slot: int, tokens: Sequence[int], offset: int
    ) -> tuple[Any, list[tuple[int, Any]]]:
        """Runs `PagedPrograms.prefill` for a slot; returns its logits and hidden states."""
        self._pages, self._history, logits, chunks = device.run(
            self._paged.prefill, *self._text(), slot, tokens, offset, *self._openings[slot]
        )
        return logits, chunks
