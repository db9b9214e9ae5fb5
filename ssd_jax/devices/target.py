"""The target role on devices: parameters, pages, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices import device
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.target_programs import Programs
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import Drafted, Outcomes, TopLogprobs
from ssd_jax.sampling.logprobs import Logprobs
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.sampling.variants import VARIANTS


class _Forward(NamedTuple):
    """Logits [B * (w + 1), V] of a forward with w proposed tokens; pending ones at `lengths`."""

    logits: jax.Array
    lengths: Int32[np.ndarray, "B"]
    width: int


class PendingOutcome:
    """Results of a verification on their way from the device; see `protocols.Pending`."""

    def __init__(self, packed: jax.Array, bonus: jax.Array, logprobs: Logprobs | None) -> None:
        self.bonus = bonus
        self._packed = packed
        self._logprobs = logprobs
        for array in jax.tree.leaves((packed, logprobs)):
            device.begin_read(array)

    def ready(self) -> bool:
        """See `protocols.Pending.ready`."""
        return self._packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    def read(self) -> Outcomes:
        """See `protocols.Pending.read`."""
        packed = device.read(self._packed)
        log = self._logprobs
        reported = None if log is None else TopLogprobs(*(device.read(array) for array in log))
        return Outcomes(packed[:, 0], packed[:, 1:], reported)


class DeviceTarget(PagedRole):
    """See `protocols.Target`. Every call only dispatches; nothing here waits for the device."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        super().__init__(programs, parameters)
        self.context = programs.context
        self.max_chunk = max(programs.model.execution.prefill_chunks)
        self._programs = programs
        model, blank = programs.model, programs.verification.blank
        self._nothing = model.place(blank(self.slots))
        programs.placed(jax.tree.map(np.asarray, blank(self.slots)))  # compiles it before rounds do
        self._nothing_in_one = model.place_whole(blank(1))

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.Target.prefill`."""
        self._run_prefill(slot, tokens, offset)

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> PendingOutcome:
        """See `protocols.Target.prefill_last`."""
        logits = self._run_prefill(slot, tokens, offset)
        start = np.array([offset + len(tokens) - 1], np.int32)
        packed, bonus, self._history, logprobs = device.run(
            self._programs.fitting(("accept", 1, 0), lambda: VARIANTS["full"]),
            logits,
            self._nothing_in_one,
            self._rows.row(slot),
            start,
            self._history,
            np.int32(slot),
        )
        return PendingOutcome(packed, bonus, logprobs)

    def forward(
        self,
        pending: Int32[np.ndarray, "B"] | Int32[jax.Array, "B"],
        lengths: Int32[np.ndarray, "B"],
        drafted: Drafted | None = None,
    ) -> _Forward:
        """See `protocols.Target.forward`."""
        most = 0 if drafted is None else int(drafted.lengths.max())
        width = min(width for width in self._programs.widths if width >= most)
        forward = self._programs.reaching(("forward", width), int(lengths.max()) + width + 1)
        tokens = self._nothing.tokens if drafted is None else drafted.tokens
        logits, self._pages = device.run(
            self._programs[forward],
            self._parameters,
            self._pages,
            self._table,
            pending,
            tokens,
            lengths,
        )
        return _Forward(logits, lengths, width)

    def accept(self, logits: _Forward, proposal: Proposal | None = None) -> PendingOutcome:
        """See `protocols.Target.accept`."""
        packed, bonus, self._history, logprobs = device.run(
            self._programs.fitting(
                ("accept", self.slots, logits.width), partial(self._rows.needed, logits.lengths)
            ),
            logits.logits,
            self._nothing if proposal is None else device.run(self._programs.placed, proposal),
            self._rows.on_device(),
            logits.lengths,
            self._history,
            np.int32(0),
        )
        return PendingOutcome(packed, bonus, logprobs)
