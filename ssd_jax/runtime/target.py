"""The target role on devices: parameters, pages, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from ssd_jax.models.functional import Parameters
from ssd_jax.runtime.programs import Programs
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.rows import SamplingRows


class PendingArray:
    """An array on its way from the device."""

    def __init__(self, array: jax.Array) -> None:
        self._array = array
        array.copy_to_host_async()

    def read(self) -> np.ndarray:
        """Waits for the values."""
        return np.asarray(self._array)


class DeviceTarget:
    """See `roles.Target`. Every call only dispatches; nothing here waits for the device."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        self.slots = programs.slots
        self.context = programs.context
        self.max_chunk = max(programs.model.execution.prefill_chunks)
        self._programs = programs
        self._parameters = list(parameters)
        self._pages = programs.new_pages()
        self._history = programs.new_history()
        self._rows = SamplingRows(programs.slots, programs.model.config.vocab_size)
        self._forward = programs["forward", 1]
        self._accept = programs["accept", programs.slots]

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Target.open`."""
        self._rows.set(slot, params, index, banned, ban_before)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `roles.Target.prefill`."""
        self._run_prefill(slot, tokens, offset)

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> PendingArray:
        """See `roles.Target.prefill_last`."""
        logits = self._run_prefill(slot, tokens, offset)
        start = np.array([offset + len(tokens) - 1], np.int32)
        accept = self._programs["accept", 1]
        bonus, self._history = accept(
            logits, self._rows.row(slot), start, self._history, np.int32(slot)
        )
        return PendingArray(bonus)

    def forward(self, tokens: np.ndarray, lengths: np.ndarray) -> PendingArray:
        """See `roles.Target.forward`."""
        logits, self._pages = self._forward(self._parameters, self._pages, tokens[:, None], lengths)
        rows = self._rows.on_device()
        bonus, self._history = self._accept(logits, rows, lengths, self._history, np.int32(0))
        return PendingArray(bonus)

    def _run_prefill(self, slot: int, tokens: Sequence[int], offset: int) -> jax.Array:
        chunks = self._programs.model.execution.prefill_chunks
        width = min(chunk for chunk in chunks if chunk >= len(tokens))
        padded = np.zeros((1, width), np.int32)
        padded[0, : len(tokens)] = tokens
        where = np.array([slot, offset, len(tokens)], np.int32)
        logits, self._pages, self._history = self._programs["prefill", width](
            self._parameters, self._pages, self._history, padded, where
        )
        return logits
