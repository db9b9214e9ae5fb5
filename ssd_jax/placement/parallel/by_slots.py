"""Drafts that share the sequences of a batch: each has its own slots, with all their branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.placement.parallel.part import DraftOfParts, Part, joined, present
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.records import IDLE, Absence, BranchTokens, Promotion, SlotOpening, promotion
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.filled_pages import own_pages


class DraftBySlots(DraftOfParts):
    """See `protocols.BranchingDraft`.

    Args:
      parts: each with the same number of slots, K and M; the first has the first slots. Together
        they may have a few more slots than are used.
      slots: B.
    """

    def __init__(self, parts: Sequence[Part], slots: int) -> None:
        super().__init__(parts)
        self.slots, self.k, self.branches = slots, parts[0].k, parts[0].branches
        self.page_size = parts[0].page_size
        self._each = parts[0].slots
        self._pages = [0] * slots  # number of pages of each slot
        self._recorded: set[int] = set()  # parts with a record
        self._expanded: list[int] = []  # parts with branches

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.BranchingDraft.open`."""
        part, slot = self._of(opening.slot)
        part.open(dataclasses.replace(opening, slot=slot))
        self._pages[opening.slot] = len(opening.pages)
        self.lose(own_pages(opening, self.page_size), owner=part)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.BranchingDraft.set_pages`."""
        part, own = self._of(slot)
        part.set_pages(own, pages)
        known, self._pages[slot] = self._pages[slot], len(pages)
        self.lose(pages[known:], owner=part)

    def lose(self, pages: Sequence[int], *, owner: Part | None = None) -> None:
        """See `Part.lose`: all slots share the stock of pages, and parts other than the owner may
        have filled these before."""
        for part in self._parts:
            if part is not owner:
                part.lose(pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.BranchingDraft.prefill`."""
        part, slot = self._of(slot)
        part.prefill(slot, tokens, offset)

    def promote(self, promotion: Promotion) -> None:
        """See `protocols.BranchingDraft.promote`."""
        for number, part in enumerate(self._parts):
            own = self._own(promotion, number)
            live = bool((own.position != IDLE).any())
            if live or number in self._recorded:
                part.promote(own)
            (self._recorded.add if live else self._recorded.discard)(number)

    def _own(self, promoted: Promotion, number: int) -> Promotion:
        """The rows of a promotion that a part is told: those of its slots."""
        own = promotion(self._each, self.k, promoted.committed.shape[1])
        rows = self._rows(number)
        for mine, told in zip(own, promoted, strict=True):
            mine[: rows.stop - rows.start] = told[rows]
        return own

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        """See `protocols.BranchingDraft.draft`; the parts draft in parallel."""
        asked = [number for number in range(len(self._parts)) if limits[self._rows(number)].any()]
        waits = [
            self._parts[number].draft(
                self._dealt(limits, number), lowered=self._dealt(lowered, number)
            )
            for number in asked
        ]

        def drafted() -> np.ndarray:
            found = np.zeros_like(limits)
            for number, wait in zip(asked, waits, strict=True):
                rows = self._rows(number)
                found[rows] = wait()[: rows.stop - rows.start]
            return found

        return drafted

    def tokens(self) -> np.ndarray:
        """See `protocols.BranchingDraft.tokens`."""
        return self._all([part.tokens() for part in self._parts])

    def proposal(self) -> Proposal:
        """See `protocols.BranchingDraft.proposal`."""
        told = [part.proposal() for part in self._parts]
        return Proposal(*(self._all(arrays) for arrays in zip(*told, strict=True)))

    def confidence(self) -> np.ndarray:
        """See `protocols.BranchingDraft.confidence`."""
        return self._all([part.confidence() for part in self._parts])

    def expand(
        self,
        counts: np.ndarray,
        *,
        follow: np.ndarray,
        lowered: np.ndarray,
        forwards: int,
        skip: np.ndarray | None = None,
    ) -> None:
        """See `protocols.BranchingDraft.expand`."""
        self._expanded, self._told, self._branches = [], [], None
        for number, part in enumerate(self._parts):
            if counts[self._rows(number)].any():
                self._expanded.append(number)
                part.expand(
                    self._dealt(counts, number),
                    follow=self._dealt(follow, number),
                    lowered=self._dealt(lowered, number),
                    forwards=forwards,
                    skip=None if skip is None else self._dealt(skip, number),
                )

    def _expanding(self) -> list[Part]:
        return [self._parts[number] for number in self._expanded]

    def _joined(self, told: Sequence[BranchTokens | Absence]) -> BranchTokens:
        here = present(told)
        nothing = here[0]._replace(
            bonus=np.full_like(here[0].bonus, -1), lengths=np.zeros_like(here[0].lengths)
        )
        every = [nothing] * len(self._parts)
        for number, each in zip(self._expanded, told, strict=True):
            every[number] = nothing if isinstance(each, str) else each
        return BranchTokens(
            *(self._all(arrays) for arrays in zip(*(each[:4] for each in every), strict=True)),
            forwards=min(each.forwards for each in here),
            absent={
                slot: each
                for number, each in zip(self._expanded, told, strict=True)
                if isinstance(each, str)
                for slot in range(*self._rows(number).indices(self.slots))
            },
        )

    def activity(self) -> Activity:
        """What the parts have done since the last call."""
        return joined([part.activity() for part in self._parts], self._each)

    def _of(self, slot: int) -> tuple[Part, int]:
        number, row = divmod(slot, self._each)
        return self._parts[number], row

    def _rows(self, number: int) -> slice:
        """The slots of a part; the last parts may have none."""
        return slice(*(min(edge * self._each, self.slots) for edge in (number, number + 1)))

    def _dealt(self, array: np.ndarray, number: int) -> np.ndarray:
        """A part's rows, with zeros in slots that are not used."""
        own = array[self._rows(number)]
        if len(own) == self._each:
            return own
        return np.concatenate([own, np.zeros((self._each - len(own), *own.shape[1:]), own.dtype)])

    def _all(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        return np.concatenate(arrays)[: self.slots]
