"""The `model` drafter: a smaller model with its own pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ssd_jax.devices import device
from ssd_jax.devices.draft_programs import UNSEEN, Asked, DraftPrograms
from ssd_jax.devices.page_table import SlotPages
from ssd_jax.devices.sampling_rows import SamplingRows
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import IDLE, DraftBatch, Drafted, SlotOpening


class ModelDrafter(Drafter):
    """See `protocols.Drafter`. Every call only dispatches.

    Args:
      programs, parameters: of the draft.
      k: most tokens of a proposal; None is what the programs were compiled for.
      temperature: of sampled requests' proposals; None is each request's own.
      send: moves arrays to the target's devices, where those are others.
    """

    on_device = True

    def __init__(
        self,
        programs: DraftPrograms,
        parameters: Parameters,
        *,
        k: int | None = None,
        temperature: float | None = None,
        send: Callable[[Any], Any] | None = None,
    ) -> None:
        self._room = programs.drafting.k
        self.k = k or self._room
        self._programs = programs
        self._parameters = list(parameters)
        self._temperature, self._send = temperature, send
        self._pages = programs.new_pages()
        self._seats = SlotPages(programs)
        model = programs.model
        self._history = programs.new_history()
        self._record = model.place(programs.new_record())
        self._rows = SamplingRows(programs.slots, model.config.vocab_size, model.by_slots)
        self._cached = np.zeros(programs.slots, np.int32)  # positions with right keys and values
        self._told = np.zeros(programs.slots, np.int32)  # tokens that the history has counted
        self._proposal: Any = None

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Drafter.open`."""
        self._rows.set(opening, self._temperature)
        self._seats.open(opening)
        self._cached[opening.slot] = 0

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.Drafter.set_pages`."""
        self._seats.set(slot, pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `protocols.Drafter.prefill`."""
        text = self._parameters, self._pages, self._history, self._seats.table
        self._pages, self._history, _ = device.run(
            self._programs.prefill, *text, slot, tokens, offset, *self._seats.of_text(slot)
        )
        self._cached[slot] = self._told[slot] = offset + len(tokens)

    def propose(self, batch: DraftBatch) -> Drafted:
        """See `protocols.Drafter.propose`."""
        slots, sampling = self._programs.slots, self._rows.on_device()
        rows = batch.limit > 0
        # What was drafted beyond the committed tokens is not theirs.
        cached = np.minimum(self._cached, batch.position)
        counts = np.where(rows, batch.position + 1 - cached, 1).astype(np.int32)
        new = rows & (batch.position >= self._told)  # what a failed step has told comes again
        committed = np.full((slots, self._room + 1), -1, np.int32)
        committed[new, : batch.tokens.shape[1]] = batch.tokens[new]
        self._told[new] = batch.position[new] + 1
        unseen = np.zeros((slots, UNSEEN), np.int32)
        for slot in batch.slots:
            end = batch.counts[slot]
            unseen[slot, : counts[slot]] = batch.tokens[slot, end - counts[slot] : end]
        limits = np.where(rows, batch.limit, 0).astype(np.int32)
        lengths = np.where(rows, cached, IDLE).astype(np.int32)
        # The record's KV: the pending token and all proposed ones but the last.
        self._cached[rows] = (batch.position + limits)[rows]
        self._record, self._pages, self._history = device.run(
            self._programs.draft,
            self._parameters,
            self._pages,
            self._history,
            self._seats.table,
            self._record,
            Asked(committed, unseen, counts, lengths, limits),
            np.zeros((slots, self._room), np.int32),
            sampling,
            lambda: self._rows.needed(np.where(rows, batch.position, IDLE)),
        )
        proposal = self._record.proposal
        self._proposal = proposal if self._send is None else self._send(proposal)
        return Drafted(limits, self._proposal.tokens)

    def proposal(self) -> Any:
        """See `protocols.Drafter.proposal`."""
        return self._proposal
