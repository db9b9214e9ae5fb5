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


class _Tree(NamedTuple):
    """The tree that a forward has run.

    Attributes:
      branches: keys and values of its nodes.
    """

    parents: TokenArray
    branches: jax.Array


class _Forward(NamedTuple):
    """Logits [B * (w + 1), V] of a forward with w proposed tokens; pending ones at `lengths`.

    Attributes:
      tree: where the proposed tokens are one.
    """

    logits: jax.Array
    lengths: Int32[np.ndarray, "B"]
    width: int
    tree: _Tree | None = None


class PendingOutcome(Pending):
    """Outcomes of a verification on their way from the device.

    Args:
      packed: outcomes [rows, w + 2], see `target_programs.Programs`.
      bonus: bonus tokens [rows].
      logprobs: of the emitted tokens, if a request asks for them.
      tree: whether the outcomes are those of trees, which end with a node.
    """

    def __init__(
        self,
        packed: jax.Array,
        bonus: jax.Array,
        logprobs: Logprobs | None,
        *,
        tree: bool = False,
    ) -> None:
        self._packed, self._bonus = packed, bonus
        self._logprobs, self._tree = logprobs, tree
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
        if self._tree:
            return Outcomes(packed[:, 0], packed[:, 1:-1], reported, packed[:, -1])
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
        if drafted is not None and drafted.parents is not None:
            return self._forward_tree(pending, lengths, drafted.tokens, drafted.parents)
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

    def _forward_tree(
        self,
        pending: TokenArray,
        lengths: Int32[np.ndarray, "B"],
        tokens: TokenArray,
        parents: TokenArray,
    ) -> _Forward:
        programs = self._programs
        forward = programs.select_reach(("forward_tree",), int(lengths.max()) + 1)
        text = self._parameters, self._pages, self._table
        logits, self._pages, branches = device.run(
            programs[forward], *text, pending, tokens, parents, lengths
        )
        nodes = programs.verification.nodes
        return _Forward(logits, lengths, nodes, _Tree(parents, branches))

    @override
    def accept(
        self, logits: LogitsHandle, proposal: ProposalHandle | None = None
    ) -> PendingOutcome:
        assert isinstance(logits, _Forward)
        if logits.tree is not None:
            assert proposal is not None
            return self._accept_tree(logits, logits.tree, proposal)
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

    def _accept_tree(
        self,
        forward: _Forward,
        tree: _Tree,
        drafted: ProposalHandle,
    ) -> PendingOutcome:
        programs, (logits, start, *_) = self._programs, forward
        needed = partial(self._rows.needed, start)
        drafted = device.run(programs.to_device, drafted)
        accept = programs.select(("accept_tree",), needed)
        reported = bool((self._reported & (start >= 0)).any())
        source, sampling = logits, self._rows.on_device()
        if reported and programs.verification.logprobs_of == "processed":
            law = programs.select(("law_tree",), needed)  # before the history changes
            (source,) = device.run(
                law, logits, drafted, tree.parents, sampling, start, self._history
            )
        outcome, bonus, self._history, self._pages, path = device.run(
            accept,
            logits,
            drafted,
            tree.parents,
            tree.branches,
            self._pages,
            self._table,
            sampling,
            start,
            self._history,
        )
        logprobs = None
        if reported:
            (source,) = device.run(programs["path_logits",], source, path)
            depth = programs.verification.widths[-1]
            report = programs["logprobs", self.slots, depth]
            (logprobs,) = device.run(report, source, outcome[:, :-1])
        return PendingOutcome(outcome, bonus, logprobs, tree=True)

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
