"""The target role on devices: parameters, pages, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.programs import device
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.target.prompt_scores import PromptScores
from ssd_jax.devices.target.results import DeviceLogprobs, PendingOutcome
from ssd_jax.devices.target.round_sizes import RoundSize, RoundSizes
from ssd_jax.models.functional import Parameters
from ssd_jax.models.sharding import fully_addressable
from ssd_jax.roles.handles import LogitsHandle, ProposalHandle, TokenArray
from ssd_jax.roles.protocols import Target
from ssd_jax.roles.records import Drafted, Masks, ProposedTokens, SlotOpening
from ssd_jax.sampling.masks import ANY_TOKEN, words_of
from ssd_jax.sampling.variants import VARIANTS, Needed
from ssd_jax.system.new_arrays import create_arrays


class _Tree(NamedTuple):
    """The tree that a forward has run.

    Attributes:
      branches: keys and values of its nodes.
    """

    parents: TokenArray
    branches: jax.Array


class _Forward(NamedTuple):
    """Logits [b * (w + 1), V] of a forward with w proposed tokens; pending ones at `lengths`.

    Attributes:
      size: of the batch; b slots of every group of devices.
      tree: where the proposed tokens are one.
      trial: the same of a batch size that is on trial, run beforehand.
    """

    logits: jax.Array
    lengths: Int32[np.ndarray, "B"]
    width: int
    size: RoundSize
    tree: _Tree | None = None
    trial: _Forward | None = None


class _Verified(NamedTuple):
    """What an `accept` verifies: all rows, or one, with so many proposed tokens.

    Attributes:
      slots: of the batch, of every group of devices.
    """

    rows: int
    proposed: int
    slots: int


class DeviceTarget(PagedRole, Target):
    """The target on the devices of this process. Every call only dispatches."""

    def __init__(self, programs: Programs, parameters: Parameters) -> None:
        super().__init__(programs, parameters)
        self.context = programs.context
        self.max_chunk = max(programs.model.execution.prefill_chunks)
        self._programs, self._sizes = programs, RoundSizes(programs)
        model, blank = programs.model, programs.verification.blank
        no_proposal, no_proposal_in_one_row = create_arrays(lambda: (blank(self.slots), blank(1)))
        self._no_proposal = model.place(no_proposal)
        programs.warm_up()
        self._no_proposal_in_one_row = model.replicate(no_proposal_in_one_row)
        self._scores = PromptScores(programs, self._parameters)

    @override
    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._sizes.open(opening)
        self._scores.open(opening)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._prefill_logits(slot, tokens, offset)

    @override
    def prefill_last(
        self, slot: int, tokens: Sequence[int], offset: int, masks: Masks | None = None
    ) -> PendingOutcome:
        return self._verify(
            _Verified(1, 0, self._programs.local_slots),
            lambda: VARIANTS["full"],
            self._sizes.reported(slot),
            self._prefill_logits(slot, tokens, offset),
            self._no_proposal_in_one_row,
            self._rows.row(slot),
            np.array([offset + len(tokens) - 1], np.int32),
            slot,
            masks,
        )

    @override
    def score(self, slot: int, tokens: Sequence[int]) -> DeviceLogprobs:
        return self._scores.score(slot, tokens)

    @override
    def forward(
        self,
        pending: TokenArray,
        lengths: Int32[np.ndarray, "B"],
        drafted: Drafted | None = None,
    ) -> _Forward:
        if drafted is not None and drafted.parents is not None:
            task: int | str = "tree"
            run = partial(self._forward_tree, pending, lengths, drafted.tokens, drafted.parents)
        else:
            longest = 0 if drafted is None else int(drafted.lengths.max())
            task = min(width for width in self._programs.widths if width >= longest)
            tokens = self._no_proposal.tokens if drafted is None else drafted.tokens
            run = partial(self._forward, task, pending, lengths, tokens)
        size = self._sizes.choose(lengths, task)
        if not size.trial:
            return run(size)
        trial = run(size)
        return run(self._sizes.all)._replace(trial=trial)  # leaves its own keys and values

    def _forward(
        self,
        width: int,
        pending: TokenArray,
        lengths: Int32[np.ndarray, "B"],
        tokens: TokenArray,
        size: RoundSize,
    ) -> _Forward:
        programs = self._programs
        forward = programs.select_reach(("forward", width), int(lengths.max()) + width + 1)
        logits, self._pages = device.run(
            programs[programs.batch_name(forward, size.slots)],
            self._parameters,
            self._pages,
            self._table,
            pending,
            tokens,
            lengths,
        )
        return _Forward(logits, lengths, width, size)

    def _forward_tree(
        self,
        pending: TokenArray,
        lengths: Int32[np.ndarray, "B"],
        tokens: TokenArray,
        parents: TokenArray,
        size: RoundSize,
    ) -> _Forward:
        programs = self._programs
        forward = programs.select_reach(("forward_tree",), int(lengths.max()) + 1)
        text = self._parameters, self._pages, self._table
        logits, self._pages, branches = device.run(
            programs[programs.batch_name(forward, size.slots)],
            *text,
            pending,
            tokens,
            parents,
            lengths,
        )
        nodes = programs.verification.nodes
        return _Forward(logits, lengths, nodes, size, _Tree(parents, branches))

    @override
    def read_tokens(self, drafted: Drafted) -> ProposedTokens:
        parents = None if drafted.parents is None else _read(drafted.parents)
        return ProposedTokens(_read(drafted.tokens), parents)

    @override
    def accept(
        self,
        logits: LogitsHandle,
        proposal: ProposalHandle | None = None,
        masks: Masks | None = None,
    ) -> PendingOutcome:
        assert isinstance(logits, _Forward)
        if proposal is not None:
            proposal = device.run(self._programs.to_device, proposal)
        if logits.trial is None:
            return self._accept(logits, proposal, masks)
        trial, history = logits.trial, jax.tree.map(jnp.copy, self._history)
        tried = self._accept(trial, proposal, masks)
        self._history = history
        outcome = self._accept(logits, proposal, masks)
        both = (trial.logits, logits.logits), (tried, outcome)
        self._sizes.judge(trial.size, *both, logits.lengths)
        return outcome

    def _accept(
        self, forward: _Forward, drafted: ProposalHandle | None, masks: Masks | None
    ) -> PendingOutcome:
        if forward.tree is not None:
            return self._accept_tree(forward, forward.tree, drafted, masks)
        return self._verify(
            _Verified(self.slots, forward.width, forward.size.slots),
            partial(self._rows.needed, forward.lengths),
            self._sizes.reports(forward.lengths),
            forward.logits,
            self._no_proposal if drafted is None else drafted,
            self._rows.on_device(),
            forward.lengths,
            0,
            masks,
        )

    def _accept_tree(
        self,
        forward: _Forward,
        tree: _Tree,
        drafted: ProposalHandle | None,
        masks: Masks | None,
    ) -> PendingOutcome:
        programs, logits, start = self._programs, forward.logits, forward.lengths
        needed = partial(self._rows.needed, start)
        kind, device_masks = self._masks(masks, self.slots, forward.width + 1)
        size = forward.size.slots
        accept = programs.select(programs.batch_name((f"{kind}accept_tree",), size), needed)
        reported = self._sizes.reports(start)
        source, sampling = logits, self._rows.on_device()
        if reported and programs.verification.logprobs_of == "processed":
            # Before the history changes.
            law = programs.select(programs.batch_name((f"{kind}law_tree",), size), needed)
            (source,) = device.run(
                law, logits, drafted, tree.parents, sampling, start, self._history, *device_masks
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
            *device_masks,
        )
        logprobs = None
        if reported:
            along = programs[programs.batch_name(("path_logits",), size)]
            (source,) = device.run(along, source, path)
            depth = programs.verification.widths[-1]
            report = programs[programs.batch_name(("logprobs", self.slots, depth), size)]
            (logprobs,) = device.run(report, source, outcome[:, :-1])
        batch = size * programs.model.data_shards
        return PendingOutcome(outcome, bonus, logprobs, tree=True, batch=batch)

    def _prefill_logits(self, slot: int, tokens: Sequence[int], offset: int) -> jax.Array:
        """Logits of the last token."""
        logits, chunks = self._run_prefill(slot, tokens, offset)
        self._scores.prefilled(slot, chunks)
        return logits

    def _verify(
        self,
        verified: _Verified,
        needed: Needed,
        reported: bool,
        logits: jax.Array,
        drafted: ProposalHandle,
        sampling: Any,
        start: np.ndarray,
        slot: int,
        masks: Masks | None,
    ) -> PendingOutcome:
        """Runs `accept`, and what reports beside it."""
        programs, report_source = self._programs, logits
        arguments = drafted, sampling, start
        kind, device_masks = self._masks(masks, verified.rows, verified.proposed + 1)
        rest, shape = (np.int32(slot), *device_masks), verified[:2]
        if reported and programs.verification.logprobs_of == "processed":
            # Before the history changes.
            law = programs.select(
                programs.batch_name((f"{kind}law", *shape), verified.slots), needed
            )
            (report_source,) = device.run(law, logits, *arguments, self._history, *rest)
        name = programs.batch_name((f"{kind}accept", *shape), verified.slots)
        outcome, bonus, self._history = device.run(
            programs.select(name, needed), logits, *arguments, self._history, *rest
        )
        logprobs = None
        if reported:
            report = programs[programs.batch_name(("logprobs", *shape), verified.slots)]
            (logprobs,) = device.run(report, report_source, outcome)
        batch = verified.slots * programs.model.data_shards
        return PendingOutcome(outcome, bonus, logprobs, batch=batch)

    def _masks(
        self, masks: Masks | None, rows: int, positions: int
    ) -> tuple[str, list[jax.Array | np.ndarray]]:
        """Which programs run, and their last argument: masks for all rows of the logits."""
        if masks is None:
            return "", []
        model = self._programs.model
        padded = np.full((rows, positions, words_of(model.config.vocab_size)), ANY_TOKEN, np.int32)
        _, count, words = masks.shape  # no more positions than the logits have
        padded[:, :count, :words] = masks
        place = model.place if rows == self.slots else model.replicate
        return "masked_", [place(padded)]


def _read(tokens: TokenArray) -> Int32[np.ndarray, "B K"]:
    return device.read(fully_addressable(tokens) if isinstance(tokens, jax.Array) else tokens)
