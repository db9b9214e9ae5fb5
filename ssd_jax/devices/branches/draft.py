"""The draft of SSD on devices: pages, branches, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.devices.branches.branching import Expansion
from ssd_jax.devices.branches.expansion_programs import BRANCHES, ExpansionPrograms
from ssd_jax.devices.branches.packed import PackedBranches
from ssd_jax.devices.branches.role import BranchingRole
from ssd_jax.devices.draft.programs import UNSEEN, DraftRequest
from ssd_jax.devices.programs import device
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.protocols import RecordAnswer
from ssd_jax.roles.records import (
    IDLE,
    BranchTokens,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    no_branches,
    no_promotion,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system.new_arrays import create_arrays


class _MenuEntry:
    """The programs for one M, and the branches that they have made."""

    def __init__(self, programs: ExpansionPrograms) -> None:
        self.programs = programs
        self.scratch = programs.new_scratch()
        self.expansion: Expansion = programs.new_expansion()


class BranchDraft(BranchingRole):
    """A draft that branches, on the devices of this process. Only what reads results waits.

    An expansion runs the programs of `menu` with the fewest branches that hold its fan-outs.

    Args:
      menu: programs for one or more M, over the same base.
      parameters, temperature: see `PagedRole`.

    Attributes:
      variants: of the programs.
      support: number of ids that a proposal's q is kept for.
    """

    def __init__(
        self,
        menu: Sequence[ExpansionPrograms],
        parameters: Parameters,
        *,
        temperature: float | None = None,
    ) -> None:
        menu = sorted(menu, key=lambda programs: programs.branches)
        base = menu[-1].base
        super().__init__(base, parameters, temperature)
        self.k, self.branches = base.drafting.k, menu[-1].branches
        self.variants = base.variants
        self._base = base
        self._record = base.model.place(create_arrays(lambda: base.records(self.slots)))
        self.support = self._record.proposal.q.shape[-1]
        self._menu = [_MenuEntry(programs) for programs in menu]
        self._active = self._menu[-1]  # with the branches of the last expansion
        self._size = base.local_slots  # batch size of the last expansion
        self._position, self._pending = no_promotion(self.slots, self.k)[:2]
        self._last_drafted = np.full(self.slots, IDLE, np.int32)
        """Position of the last token of a record that was drafted just in time, if no expansion has
        run it."""

    @property
    def budgets(self) -> tuple[int, ...]:
        """All M of the menu, ascending."""
        return tuple(entry.programs.branches for entry in self._menu)

    def extend(self, programs: ExpansionPrograms) -> None:
        """Adds programs for fewer branches, at any time and from any thread."""
        menu = [*self._menu, _MenuEntry(programs)]
        self._menu = sorted(menu, key=lambda entry: entry.programs.branches)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._run_prefill(slot, tokens, offset)
        self._last_drafted[slot] = IDLE

    @override
    def record(self, request: RecordRequest) -> DeviceRecords:
        """Dispatches the promotion, then the draft just in time, if its programs are there."""
        promotion = request.promotion
        self._position, self._pending = promotion.position, promotion.pending
        for part in self._split(promotion):
            self._promote(part)
        drafts = request.drafts if self._base.drafts else np.zeros_like(request.drafts)
        if drafts.any():
            self._draft(drafts, promotion.before_pending, request.lowered)
        return DeviceRecords(self, drafts)

    def _promote(self, promotion: Promotion) -> None:
        active = self._active
        self._pages, self._history, self._record = device.run(
            active.programs.promote(active.programs.choose_size(promotion.live, BRANCHES)),
            *self._text()[1:],
            active.scratch,
            active.expansion,
            promotion,
        )

    def _draft(self, limits: Row, last: Row, lowered: Int32[np.ndarray, "B K"]) -> None:
        """Drafts `limits` tokens; `last` are the tokens before the pending ones."""
        rows, pending = limits > 0, self._pending
        lacks_last = rows & (self._last_drafted >= 0) & (self._last_drafted == self._position - 1)
        pair = np.where(lacks_last, last, pending), np.where(lacks_last, pending, 0)
        request = DraftRequest(
            committed=np.full((self.slots, self.k + 1), -1, np.int32),
            unseen=np.stack(pair, axis=1).astype(np.int32),
            counts=np.where(lacks_last, UNSEEN, 1).astype(np.int32),
            lengths=np.where(rows, self._position - lacks_last, IDLE).astype(np.int32),
            limits=limits.astype(np.int32),
        )
        self._last_drafted = np.where(rows, self._position + limits, IDLE).astype(np.int32)
        self._record, self._pages, self._history = device.run(
            self._base.draft,
            *self._text(),
            self._record,
            request,
            lowered.astype(np.int32),
            self._rows.on_device(),
            partial(self._rows.needed, request.lengths),
        )

    def proposal(self) -> Proposal:
        """The records' proposals, on the device."""
        return self._record.proposal

    def confidence(self) -> Int32[np.ndarray, "B K"]:
        """Waits for the draft's confidence in the records' tokens."""
        return device.read(self._record.confidence)

    @override
    def expand(self, request: ExpansionRequest) -> DeviceBranches:
        counts, lowered = request.counts.astype(np.int32), request.lowered.astype(np.int32)
        skip = np.zeros_like(counts) if request.skip is None else request.skip.astype(np.int32)
        sampling, needed = self._rows.on_device(), partial(self._rows.needed, self._position)
        needed_branches = counts.sum(axis=1).max()
        active = next(entry for entry in self._menu if entry.programs.branches >= needed_branches)
        self._active = active
        self._size = active.programs.choose_size(self._position >= 0, BRANCHES)
        self._last_drafted[counts.any(axis=1)] = IDLE
        if request.follow.any():
            self._pages, self._record = device.run(
                active.programs.select("follow", self._position, needed, self._size),
                *self._text(),
                self._record,
                request.follow,
                sampling,
            )
        self._pages, active.scratch, active.expansion, packed = device.run(
            active.programs.select("expand", self._position, needed, self._size),
            *self._text(),
            active.scratch,
            self._record,
            counts,
            skip,
            lowered,
            sampling,
        )
        answer = DeviceBranches(self, lowered, packed)
        for _ in range(1, request.forwards):
            answer.grow()
        answer.begin_read()
        return answer

    def grow(self, lowered: Int32[np.ndarray, "B K"]) -> jax.Array:
        """Runs one more forward of all branches; returns `ExpansionPrograms`' `packed`."""
        active = self._active
        self._pages, active.scratch, active.expansion, packed = device.run(
            active.programs.select(
                "grow", self._position, partial(self._rows.needed, self._position), self._size
            ),
            *self._text(),
            active.scratch,
            active.expansion,
            lowered,
            self._rows.on_device(),
        )
        return packed


class DeviceRecords(RecordAnswer):
    """Records on a draft's devices.

    Args:
      drafts: number of tokens drafted just in time.
    """

    def __init__(self, draft: BranchDraft, drafts: Row) -> None:
        self._draft, self._drafts = draft, drafts

    @override
    def lengths(self) -> Row:
        """At once: whatever is dispatched will be drafted."""
        return self._drafts

    @override
    def tokens(self) -> Any:
        return self.proposal().tokens

    @override
    def confidence(self) -> Int32[np.ndarray, "B K"]:
        return self._draft.confidence()

    @override
    def proposal(self) -> Proposal:
        return self._draft.proposal()


class DeviceBranches(PackedBranches):
    """Branches on a draft's devices.

    Args:
      lowered: D of Saguaro sampling [B, K].
      packed: the branches after the first forward, as `ExpansionPrograms` packs them.
    """

    def __init__(
        self, draft: BranchDraft, lowered: Int32[np.ndarray, "B K"], packed: jax.Array
    ) -> None:
        super().__init__(packed)
        self._draft, self._lowered = draft, lowered

    @override
    def _grown(self, forwards: int) -> jax.Array:
        return self._draft.grow(self._lowered)

    @override
    def _unpacked(
        self, packed: Int32[np.ndarray, "B branches columns"], forwards: int
    ) -> BranchTokens:
        k = self._draft.k
        arrays = packed[..., 0], packed[..., 1], packed[..., 2 : 2 + k], packed[..., 2 + k :]
        count, all_branches = packed.shape[1], self._draft.branches
        if count == all_branches:
            return BranchTokens(*arrays, forwards)
        branches = no_branches(self._draft.slots, all_branches, k, forwards)
        for target, array in zip(branches[:4], arrays, strict=True):
            target[:, :count] = array
        return branches
