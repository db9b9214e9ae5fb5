"""The draft of SSD on devices: pages, branches, and dispatch of the compiled programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import numpy as np
from jaxtyping import Bool, Int, Int32

from ssd_jax.devices import device
from ssd_jax.devices.branching import Expansion
from ssd_jax.devices.draft_programs import UNSEEN, Asked
from ssd_jax.devices.expansion_programs import ExpansionPrograms
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import IDLE, BranchTokens, Promotion, SlotOpening, no_branches
from ssd_jax.roles.records import promotion as no_promotion
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.stored_jit import create_arrays


class _Branches:
    """The programs for one M, and the branches that they have made."""

    def __init__(self, programs: ExpansionPrograms) -> None:
        self.programs = programs
        self.scratch = programs.new_scratch()
        self.expansion: Expansion = programs.base.model.place(
            create_arrays(lambda: programs.nothing(programs.base.slots))
        )


class BranchDraft(PagedRole):
    """See `protocols.BranchingDraft`. Calls only dispatch, except those that read results.

    An expansion runs the programs of `menu` with the fewest branches that hold its fan-outs. A
    promotion is dispatched with what needs it, an expansion as a rule: the target's forward, which
    is dispatched between the two, then does not wait for that.

    Args:
      menu: programs for one or more M, over the same base.
      parameters, temperature: see `PagedRole`.
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
        self._menu = [_Branches(programs) for programs in menu]
        self._held = self._menu[-1]  # with the branches of the last expansion
        self._told: Any = None  # `news` of the branches, on the device
        self._heard: BranchTokens | None = None  # the same on the host
        self._forwards = 0  # of the expansion
        self._position, self._pending = no_promotion(self.slots, self.k)[:2]
        self._promotion: Promotion | None = None  # not dispatched yet
        self._tokens: np.ndarray | None = None  # of the records; None where only the device knows

    @property
    def budgets(self) -> tuple[int, ...]:
        """All M of the menu, ascending."""
        return tuple(each.programs.branches for each in self._menu)

    def extend(self, programs: ExpansionPrograms) -> None:
        """Adds programs for fewer branches, at any time and from any thread."""
        menu = [*self._menu, _Branches(programs)]
        self._menu = sorted(menu, key=lambda each: each.programs.branches)

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.BranchingDraft.open`."""
        self._settle()
        super().open(opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.BranchingDraft.set_pages`."""
        self._settle()
        super().set_pages(slot, pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.BranchingDraft.prefill`."""
        self._settle()
        self._run_prefill(slot, tokens, offset)

    def promote(self, promotion: Promotion) -> None:
        """See `protocols.BranchingDraft.promote`. Any number of tokens may have been committed."""
        room, committed = self.k + 1, np.asarray(promotion.committed)
        while committed.shape[1] > room:  # too many: count the first ones beforehand
            self._settle()
            nothing = no_promotion(self.slots, self.k)
            self._promotion = nothing._replace(committed=committed[:, :room])
            committed = committed[:, room:]
        self._settle()
        padded = np.full((self.slots, room), -1, np.int32)
        padded[:, : committed.shape[1]] = committed
        self._position, self._pending = promotion.position, promotion.pending
        self._tokens = self._known(promotion)
        self._promotion = promotion._replace(committed=padded)

    def _known(self, promotion: Promotion) -> Int32[np.ndarray, "B K"] | None:
        """The tokens of the new records, as far as the host knows them; None if it does not."""
        tokens, heard = promotion.tokens.copy(), self._heard
        for slot, winner in enumerate(promotion.winner.tolist()):
            if winner >= 0:
                if heard is None:
                    return None
                tokens[slot] = heard.tokens[slot, winner]
        return tokens

    def _settle(self) -> None:
        """Dispatches the promotion that was put off, if there is one."""
        promotion, self._promotion = self._promotion, None
        if promotion is None:
            return
        held = self._held
        self._pages, self._history, self._record = device.run(
            held.programs["promote"],
            *self._text()[1:],
            held.scratch,
            held.expansion,
            promotion,
        )

    def draft(
        self, limits: Int[np.ndarray, "B"], *, lowered: Int[np.ndarray, "B K"]
    ) -> Callable[[], Int[np.ndarray, "B"]]:
        """See `protocols.BranchingDraft.draft`; drafts nothing while its programs are missing."""
        if not self._base.drafts:
            return lambda: np.zeros_like(limits)
        self._settle()
        rows, self._tokens = limits > 0, None
        unseen = np.zeros((self.slots, UNSEEN), np.int32)
        unseen[:, 0] = self._pending
        asked = Asked(
            committed=np.full((self.slots, self.k + 1), -1, np.int32),
            unseen=unseen,
            counts=np.ones(self.slots, np.int32),
            lengths=np.where(rows, self._position, IDLE).astype(np.int32),
            limits=limits.astype(np.int32),
        )
        self._record, self._pages, self._history = device.run(
            self._base.draft,
            *self._text(),
            self._record,
            asked,
            lowered.astype(np.int32),
            self._rows.on_device(),
            partial(self._rows.needed, asked.lengths),
        )
        return lambda: limits

    def tokens(self) -> Any:
        """See `protocols.BranchingDraft.tokens`.

        They are on the host, so that the target's forward does not wait for `promote`, except for
        tokens that were drafted just in time.
        """
        return self.proposal().tokens if self._tokens is None else self._tokens

    def proposal(self) -> Any:
        """See `protocols.BranchingDraft.proposal`."""
        self._settle()
        return self._record.proposal

    def confidence(self) -> Int32[np.ndarray, "B K"]:
        """See `protocols.BranchingDraft.confidence`."""
        self._settle()
        return device.read(self._record.confidence)

    def expand(
        self,
        counts: Int[np.ndarray, "B F"],
        *,
        follow: Bool[np.ndarray, "B"],
        lowered: Int[np.ndarray, "B K"],
        forwards: int,
        skip: Int[np.ndarray, "B F"] | None = None,
    ) -> None:
        """See `protocols.BranchingDraft.expand`."""
        self._settle()
        skip = np.zeros_like(counts) if skip is None else skip
        sampling, needed = self._rows.on_device(), partial(self._rows.needed, self._position)
        most = counts.sum(axis=1).max()
        held = self._held = next(each for each in self._menu if each.programs.branches >= most)
        if follow.any():
            self._pages, self._record = device.run(
                held.programs.fitting("follow", self._position, needed),
                *self._text(),
                self._record,
                follow,
                sampling,
            )
        self._pages, held.scratch, held.expansion, self._told = device.run(
            held.programs.fitting("expand", self._position, needed),
            *self._text(),
            held.scratch,
            self._record,
            counts.astype(np.int32),
            skip.astype(np.int32),
            lowered.astype(np.int32),
            sampling,
        )
        self._forwards, self._heard = 1, None
        for _ in range(1, forwards):
            self.grow(lowered)
        device.begin_read(self._told)

    def grow(self, lowered: Int[np.ndarray, "B K"]) -> None:
        """Runs one more forward of all branches; see `protocols.BranchingDraft.expand`."""
        self._forwards += 1
        needed = partial(self._rows.needed, self._position)
        held = self._held
        self._pages, held.scratch, held.expansion, self._told = device.run(
            held.programs.fitting("grow", self._position, needed),
            *self._text(),
            held.scratch,
            held.expansion,
            lowered.astype(np.int32),
            self._rows.on_device(),
        )

    def ready(self) -> bool:
        """Whether the branches are there, so that `branch_tokens` does not wait."""
        return self._told is None or self._told.is_ready()

    def finish(self) -> None:
        """Waits for all that was asked."""
        self._settle()
        jax.block_until_ready(self._pages)

    def branch_tokens(self, forwards: int, until: Callable[[], bool] | None = None) -> BranchTokens:
        """See `protocols.BranchingDraft.branch_tokens`.

        It waits for all that was dispatched: on the same devices the outcome comes after that.
        """
        if self._heard is None or self._heard.forwards != self._forwards:
            told, places = device.read(self._told), 2 + self.k
            heard = told[..., 0], told[..., 1], told[..., 2:places], told[..., places:]
            self._heard = BranchTokens(*heard, self._forwards)
            if told.shape[1] < self.branches:  # there is room for the most
                room = no_branches(self.slots, self.branches, self.k, self._forwards)
                for whole, few in zip(room[:4], heard, strict=True):
                    whole[:, : told.shape[1]] = few
                self._heard = room
        return self._heard


_SETTINGS = {
    "any": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=1.0, top_p=0.9),
    "full": SamplingParams(temperature=1.0, repetition_penalty=1.1),
}
"""Settings of requests that need each variant of the programs."""


def run_once(draft: BranchDraft) -> None:
    """Runs the programs of short texts once, since a first run takes far longer than later ones.

    It drafts, expands, promotes and follows something in all slots, and returns when that is done.
    Programs of wider chunks, of longer texts and of shared pages first run in rounds.
    """
    lowered = np.ones((draft.slots, draft.k), np.int32)
    everywhere = np.ones(draft.slots, bool)
    begun, won, given = (no_promotion(draft.slots, draft.k) for _ in range(3))
    for position, each in enumerate((begun, won, given)):
        each.position[:] = min(position, 1)
    won.winner[:], won.limit[:], given.limit[:] = 0, 1, draft.k
    for variant in draft.variants:
        for slot in range(draft.slots):
            draft.open(SlotOpening(slot, _SETTINGS[variant], slot))
            draft.prefill(slot, [0], 0)
        draft.promote(begun)
        draft.draft(np.full(draft.slots, draft.k, np.int32), lowered=lowered)
        for budget in draft.budgets:
            draft.expand(_counts(draft, budget), follow=~everywhere, lowered=lowered, forwards=2)
            draft.branch_tokens(2)
            draft.promote(won)
            draft.promote(given)
        most = _counts(draft, draft.branches)
        draft.expand(most, follow=everywhere, lowered=lowered, forwards=1)
        draft.branch_tokens(1)


def _counts(draft: BranchDraft, budget: int) -> np.ndarray:
    counts = np.zeros((draft.slots, draft.k + 1), np.int32)
    counts[:, 0], counts[:, draft.k] = budget - 1, 1
    return counts
