"""The `model` drafter: a smaller model with its own pages."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ssd_jax.models.functional import Parameters
from ssd_jax.runtime import device
from ssd_jax.runtime.draft_programs import UNSEEN, DraftPrograms
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import IDLE, Drafted, DraftRow, Traits
from ssd_jax.runtime.rows import SamplingRows


class ModelDrafter:
    """See `roles.Drafter`. Every call only dispatches.

    Args:
      programs, parameters: of the draft.
      k: most tokens of a proposal; None is what the programs were compiled for.
      temperature: of sampled requests' proposals; None is each request's own.
      send: moves arrays to the target's devices, where those are others.
    """

    traits = Traits(proposes="distribution", on_device=True)

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
        model = programs.model
        self._history = model.place(programs.new_history())
        self._record = model.place(programs.new_record())
        self._rows = SamplingRows(programs.slots, model.config.vocab_size, model.everywhere)
        self._cached = [0] * programs.slots  # positions whose keys and values are right
        self._told = [0] * programs.slots  # tokens that the history has counted

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Drafter.open`."""
        if self._temperature is not None and params.temperature > 0:
            params = dataclasses.replace(params, temperature=self._temperature)
        self._rows.set(slot, params, index, banned, ban_before)
        self._cached[slot] = 0

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`."""
        self._pages, self._history = device.run(
            self._programs.prefill,
            self._parameters,
            self._pages,
            self._history,
            slot,
            tokens,
            offset,
        )
        self._cached[slot] = self._told[slot] = offset + len(tokens)

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`; there is nothing to do ahead."""

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`."""
        slots, sampling = self._programs.slots, self._rows.on_device()
        committed = np.full((slots, self._room + 1), -1, np.int32)
        unseen = np.zeros((slots, UNSEEN), np.int32)
        counts = np.ones(slots, np.int32)
        lengths = np.full(slots, IDLE, np.int32)
        limits = np.zeros(slots, np.int32)
        for row in rows:
            # What was drafted beyond the committed tokens is not theirs.
            cached = min(self._cached[row.slot], row.position)
            count = row.position + 1 - cached
            # What an interrupted step has told already comes again.
            new = row.committed[len(row.committed) + self._told[row.slot] - row.position - 1 :]
            committed[row.slot, : len(new)] = new
            self._told[row.slot] = row.position + 1
            unseen[row.slot, :count] = row.committed[-count:]
            counts[row.slot], lengths[row.slot], limits[row.slot] = count, cached, row.limit
            # The record's KV: the pending token and all proposed ones but the last.
            self._cached[row.slot] = row.position + row.limit
        lowered = np.zeros((slots, self._room), np.int32)
        record, self._pages, self._history = device.run(
            self._programs["start", self._room],
            self._parameters,
            self._pages,
            self._history,
            self._record,
            committed,
            unseen,
            counts,
            lengths,
            limits,
            lowered,
            sampling,
        )
        for index in range(1, limits.max()):
            record, self._pages = device.run(
                self._programs["step", self._room],
                self._parameters,
                self._pages,
                self._history,
                record,
                np.int32(index),
                lengths >= 0,
                lowered,
                sampling,
            )
        self._record = record
        proposal = record.proposal
        return Drafted(limits, proposal if self._send is None else self._send(proposal))
