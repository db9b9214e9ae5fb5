"""The target role on devices: parameters, pages, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.devices import device, logprob_programs
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.target_programs import Programs
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.handles import LogitsHandle, ProposalHandle, TokenArray
from ssd_jax.roles.protocols import Pending, PendingLogprobs, Target
from ssd_jax.roles.records import Drafted, Outcomes, SlotOpening, TopLogprobs
from ssd_jax.sampling.logprobs import Logprobs
from ssd_jax.sampling.variants import VARIANTS, Needed
from ssd_jax.system.stored_jit import create_arrays


class _Forward(NamedTuple):
    """Logits [B * (w + 1), V] of a forward with w proposed tokens; pending ones at `lengths`."""

    logits: jax.Array
    lengths: Int32[np.ndarray, "B"]
    width: int


class PendingOutcome(Pending):
    """Outcomes of a verification on their way from the device.

    Args:
      packed: outcomes [rows, w + 2], see `target_programs.Programs`.
      bonus: bonus tokens [rows].
      logprobs: of the emitted tokens, if a request asks for them.
    """

    def __init__(self, packed: jax.Array, bonus: jax.Array, logprobs: Logprobs | None) -> None:
        self._packed, self._bonus = packed, bonus
        self._logprobs = logprobs
        for array in jax.tree.leaves((packed, logprobs)):
            device.begin_read(array)

    @property
    @override
    def bonus(self) -> jax.Array:
        return self._bonus

    @override
    def ready(self) -> bool:
        return self._packed.is_ready()  # pyright: ignore[reportAttributeAccessIssue]

    @override
    def read(self) -> Outcomes:
        packed = device.read(self._packed)
        log = self._logprobs
        reported = None if log is None else TopLogprobs(*(device.read(array) for array in log))
        return Outcomes(packed[:, 0], packed[:, 1:], reported)


class DeviceLogprobs(PendingLogprobs):
    """Log-probabilities on their way from the device.

    Args:
      parts: how many tokens each array has that count, and the arrays [1, R].
    """

    def __init__(self, parts: list[tuple[int, Logprobs]]) -> None:
        self._parts = parts
        for array in jax.tree.leaves([log for _, log in parts]):
            device.begin_read(array)

    @override
    def read(self) -> TopLogprobs:
        read = [[device.read(array)[:, :count] for array in log] for count, log in self._parts]
        return TopLogprobs(*(np.concatenate(arrays, axis=1) for arrays in zip(*read, strict=True)))


class DeviceTarget(PagedRole, Target):
    """The target on the devices of this process. Every call only dispatches."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        super().__init__(programs, parameters)
        self.context = programs.context
        self.max_chunk = max(programs.model.execution.prefill_chunks)
        self._programs = programs
        model, blank = programs.model, programs.verification.blank
        no_proposal, no_proposal_in_one_row = create_arrays(lambda: (blank(self.slots), blank(1)))
        self._no_proposal = model.place(no_proposal)
        programs.to_device(jax.tree.map(np.asarray, no_proposal))  # compiles it before rounds do
        self._no_proposal_in_one_row = model.replicate(no_proposal_in_one_row)
        self._reported = np.zeros(self.slots, bool)  # slots whose tokens get log-probabilities
        self._scored = np.zeros(self.slots, bool)  # slots whose prompts do
        self._chunks: list[tuple[int, Any]] = []  # of the last prefill, if its prompt does

    @override
    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._reported[opening.slot] = opening.params.logprobs is not None
        self._scored[opening.slot] = opening.params.prompt_logprobs is not None

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._prefill_logits(slot, tokens, offset)

    @override
    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> PendingOutcome:
        return self._verify(
            (1, 0),
            lambda: VARIANTS["full"],
            bool(self._reported[slot]),
            self._prefill_logits(slot, tokens, offset),
            self._no_proposal_in_one_row,
            self._rows.row(slot),
            np.array([offset + len(tokens) - 1], np.int32),
            slot,
        )

    @override
    def score(self, slot: int, tokens: Sequence[int]) -> DeviceLogprobs:
        parts: list[tuple[int, Logprobs]] = []
        begin = 0
        for count, hidden in self._chunks:
            width = hidden.shape[1]
            rows = logprob_programs.rows(width)
            for first in range(0, count, rows):
                scored = tokens[begin + first : begin + min(first + rows, count)]
                if scored:
                    padded = np.zeros((1, rows), np.int32)
                    padded[0, : len(scored)] = scored
                    origin = np.array([slot, first], np.int32)
                    program = self._programs["prompt_logprobs", width]
                    (logprobs,) = device.run(program, self._parameters, hidden, padded, origin)
                    parts.append((len(scored), logprobs))
            begin += count
        self._chunks = []
        return DeviceLogprobs(parts)

    @override
    def forward(
        self,
        pending: TokenArray,
        lengths: Int32[np.ndarray, "B"],
        drafted: Drafted | None = None,
    ) -> _Forward:
        longest = 0 if drafted is None else int(drafted.lengths.max())
        width = min(width for width in self._programs.widths if width >= longest)
        forward = self._programs.select_reach(("forward", width), int(lengths.max()) + width + 1)
        tokens = self._no_proposal.tokens if drafted is None else drafted.tokens
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

    @override
    def accept(
        self, logits: LogitsHandle, proposal: ProposalHandle | None = None
    ) -> PendingOutcome:
        assert isinstance(logits, _Forward)
        return self._verify(
            (self.slots, logits.width),
            partial(self._rows.needed, logits.lengths),
            bool((self._reported & (logits.lengths >= 0)).any()),
            logits.logits,
            self._no_proposal
            if proposal is None
            else device.run(self._programs.to_device, proposal),
            self._rows.on_device(),
            logits.lengths,
            0,
        )

    def _prefill_logits(self, slot: int, tokens: Sequence[int], offset: int) -> jax.Array:
        """Logits of the last token."""
        logits, chunks = self._run_prefill(slot, tokens, offset)
        self._chunks = chunks if self._scored[slot] else []
        return logits

    def _verify(
        self,
        size: tuple[int, int],
        needed: Needed,
        reported: bool,
        logits: jax.Array,
        drafted: ProposalHandle,
        sampling: Any,
        start: np.ndarray,
        slot: int,
    ) -> PendingOutcome:
        """Runs `accept` of a size (rows, proposed tokens), and what reports beside it."""
        programs, report_source = self._programs, logits
        arguments = drafted, sampling, start
        if reported and programs.verification.logprobs_of == "processed":
            law = programs.select(("law", *size), needed)  # before the history changes
            (report_source,) = device.run(law, logits, *arguments, self._history, np.int32(slot))
        accept = programs.select(("accept", *size), needed)
        outcome, bonus, self._history = device.run(
            accept, logits, *arguments, self._history, np.int32(slot)
        )
        logprobs = None
        if reported:
            (logprobs,) = device.run(programs["logprobs", *size], report_source, outcome)
        return PendingOutcome(outcome, bonus, logprobs)
