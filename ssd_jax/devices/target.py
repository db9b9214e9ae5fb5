"""The target role on devices: parameters, pages, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Int32

from ssd_jax.devices import device, logprob_programs
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.target_programs import Programs
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.handles import LogitsHandle, ProposalHandle, TokenArray
from ssd_jax.roles.records import Drafted, Outcomes, SlotOpening, TopLogprobs
from ssd_jax.sampling.logprobs import Logprobs
from ssd_jax.sampling.variants import VARIANTS, Needed
from ssd_jax.system.stored_jit import create_arrays


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


class DeviceLogprobs:
    """See `protocols.PendingLogprobs`: log-probabilities on their way from the device.

    Args:
      parts: how many tokens each array has that count, and the arrays [1, R].
    """

    def __init__(self, parts: list[tuple[int, Logprobs]]) -> None:
        self._parts = parts
        for array in jax.tree.leaves([log for _, log in parts]):
            device.begin_read(array)

    def read(self) -> TopLogprobs:
        """See `protocols.PendingLogprobs.read`."""
        read = [[device.read(array)[:, :count] for array in log] for count, log in self._parts]
        return TopLogprobs(*(np.concatenate(arrays, axis=1) for arrays in zip(*read, strict=True)))


class DeviceTarget(PagedRole):
    """See `protocols.Target`. Every call only dispatches; nothing here waits for the device."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        super().__init__(programs, parameters)
        self.context = programs.context
        self.max_chunk = max(programs.model.execution.prefill_chunks)
        self._programs = programs
        model, blank = programs.model, programs.verification.blank
        nothing, nothing_in_one = create_arrays(lambda: (blank(self.slots), blank(1)))
        self._nothing = model.place(nothing)
        programs.placed(jax.tree.map(np.asarray, nothing))  # compiles it before rounds do
        self._nothing_in_one = model.replicate(nothing_in_one)
        self._reported = np.zeros(self.slots, bool)  # slots whose tokens get log-probabilities
        self._scored = np.zeros(self.slots, bool)  # slots whose prompts do
        self._chunks: list[tuple[int, Any]] = []  # of the last prefill, if its prompt does

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Target.open`."""
        super().open(opening)
        self._reported[opening.slot] = opening.params.logprobs is not None
        self._scored[opening.slot] = opening.params.prompt_logprobs is not None

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.Target.prefill`."""
        self._prefilled(slot, tokens, offset)

    def prefill_last(self, slot: int, tokens: Sequence[int], offset: int) -> PendingOutcome:
        """See `protocols.Target.prefill_last`."""
        return self._drawn(
            (1, 0),
            lambda: VARIANTS["full"],
            bool(self._reported[slot]),
            self._prefilled(slot, tokens, offset),
            self._nothing_in_one,
            self._rows.row(slot),
            np.array([offset + len(tokens) - 1], np.int32),
            slot,
        )

    def score(self, slot: int, tokens: Sequence[int]) -> DeviceLogprobs:
        """See `protocols.Target.score`."""
        parts: list[tuple[int, Logprobs]] = []
        begin = 0
        for count, hidden in self._chunks:
            width = hidden.shape[1]
            rows = logprob_programs.rows(width)
            for first in range(0, count, rows):
                some = tokens[begin + first : begin + min(first + rows, count)]
                if some:
                    told = np.zeros((1, rows), np.int32)
                    told[0, : len(some)] = some
                    where = np.array([slot, first], np.int32)
                    program = self._programs["prompt_logprobs", width]
                    (log,) = device.run(program, self._parameters, hidden, told, where)
                    parts.append((len(some), log))
            begin += count
        self._chunks = []
        return DeviceLogprobs(parts)

    def forward(
        self,
        pending: TokenArray,
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

    def accept(
        self, logits: LogitsHandle, proposal: ProposalHandle | None = None
    ) -> PendingOutcome:
        """See `protocols.Target.accept`."""
        assert isinstance(logits, _Forward)
        return self._drawn(
            (self.slots, logits.width),
            partial(self._rows.needed, logits.lengths),
            bool((self._reported & (logits.lengths >= 0)).any()),
            logits.logits,
            self._nothing if proposal is None else device.run(self._programs.placed, proposal),
            self._rows.on_device(),
            logits.lengths,
            0,
        )

    def _prefilled(self, slot: int, tokens: Sequence[int], offset: int) -> jax.Array:
        """Logits of the last token."""
        logits, chunks = self._run_prefill(slot, tokens, offset)
        self._chunks = chunks if self._scored[slot] else []
        return logits

    def _drawn(
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
        programs, of = self._programs, logits
        verified = drafted, sampling, start
        if reported and programs.verification.logprobs_of == "processed":
            law = programs.fitting(("law", *size), needed)  # before the history changes
            (of,) = device.run(law, logits, *verified, self._history, np.int32(slot))
        accept = programs.fitting(("accept", *size), needed)
        outcome, bonus, self._history = device.run(
            accept, logits, *verified, self._history, np.int32(slot)
        )
        log = None
        if reported:
            (log,) = device.run(programs["logprobs", *size], of, outcome)
        return PendingOutcome(outcome, bonus, log)
