"""The `model` drafter: a smaller model with its own pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from ssd_jax.devices.draft.programs import UNSEEN, DraftPrograms, DraftRequest
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.programs import device
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import IDLE, DraftBatch, Drafted, SlotOpening
from ssd_jax.system.new_arrays import create_arrays


class ModelDrafter(PagedRole, Drafter):
    """Proposes tokens that a draft model draws one after another. Every call only dispatches.

    Args:
      programs, parameters, temperature: see `PagedRole`.
      k: most tokens of a proposal; None is the k that the programs were compiled for.
      send: moves arrays to the target's devices, where they differ from the draft's.
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
        super().__init__(programs, parameters, temperature)
        self._width = programs.drafting.k
        self.k = k or self._width
        self._programs = programs
        self._send = send
        self._record = programs.model.place(create_arrays(lambda: programs.records(self.slots)))
        self._cached = np.zeros(self.slots, np.int32)  # positions with right keys and values
        self._counted = np.zeros(self.slots, np.int32)  # tokens that the history has counted
        self._proposal: Any = None

    @override
    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._cached[opening.slot] = 0

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        self._run_prefill(slot, tokens, offset)
        self._cached[slot] = self._counted[slot] = offset + len(tokens)

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        rows = batch.limit > 0
        # Keys and values drafted beyond the committed tokens are not valid.
        cached = np.minimum(self._cached, batch.position)
        counts = np.where(rows, batch.position + 1 - cached, 1).astype(np.int32)
        new = rows & (batch.position >= self._counted)  # those of a failed step come again
        committed = np.full((self.slots, self._width + 1), -1, np.int32)
        committed[new, : batch.tokens.shape[1]] = batch.tokens[new]
        self._counted[new] = batch.position[new] + 1
        unseen = np.zeros((self.slots, UNSEEN), np.int32)
        for slot in batch.slots:
            end = batch.counts[slot]
            unseen[slot, : counts[slot]] = batch.tokens[slot, end - counts[slot] : end]
        limits = np.where(rows, batch.limit, 0).astype(np.int32)
        lengths = np.where(rows, cached, IDLE).astype(np.int32)
        # The record's KV: the pending token and all proposed tokens but the last.
        self._cached[rows] = (batch.position + limits)[rows]
        self._record, self._pages, self._history = device.run(
            self._programs.draft,
            *self._text(),
            self._record,
            DraftRequest(committed, unseen, counts, lengths, limits),
            np.zeros((self.slots, self._width), np.int32),
            self._rows.on_device(),
            lambda: self._rows.needed(np.where(rows, batch.position, IDLE)),
        )
        proposal = self._record.proposal
        self._proposal = proposal if self._send is None else self._send(proposal)
        return Drafted(limits, self._proposal.tokens)

    @override
    def proposal(self) -> Any:
        return self._proposal
