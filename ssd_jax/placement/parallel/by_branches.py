"""Drafts that share the branches of every sequence.

Each part has all slots and texts, and speculates for its own outcomes. The part whose branch comes
true promotes it to its record; the others get the tokens and follow, which takes one more forward.
If a part does not answer, its outcomes are divided over the others in the next round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.placement.parallel.part import DraftOfParts, Part, joined, present
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.records import (
    Absence,
    BranchTokens,
    Promotion,
    SlotOpening,
    no_branches,
    promotion,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.division import divide


class DraftByBranches(DraftOfParts):
    """See `protocols.BranchingDraft`.

    Args:
      parts: with the same slots, K and M; their records have candidates for the branches of all.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        super().__init__(parts)
        first = parts[0]
        self.slots, self.k, self.page_size = first.slots, first.k, first.page_size
        self._size = first.branches
        # A part without an outcome of k = L still has a branch there.
        self.branches = len(parts) * self._size - (len(parts) - 1)
        self._drafter = 0  # number of the part that drafts just in time
        self._owner = np.zeros(self.slots, np.int64)  # for each record, the part that made it
        self._promotion = promotion(self.slots, self.k)  # with the tokens of all records
        self._winner = self._promotion.winner  # in the part's own numbers
        self._untold: set[int] = set()  # parts that have not been given the records
        # For each branch, the part that makes it (-1 for none) and its number there.
        self._whose = self._own = np.full((self.slots, self.branches), -1)

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.BranchingDraft.open`."""
        self._tell_all()
        for part in self._parts:
            part.open(opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.BranchingDraft.set_pages`."""
        self._tell_all()
        for part in self._parts:
            part.set_pages(slot, pages)

    def lose(self, pages: Sequence[int]) -> None:
        """See `Part.lose`."""
        for part in self._parts:
            part.lose(pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        """See `protocols.BranchingDraft.prefill`."""
        self._tell_all()
        for part in self._parts:
            part.prefill(slot, tokens, offset)

    def promote(self, promotion: Promotion) -> None:
        """See `protocols.BranchingDraft.promote`. The parts are told once the tokens of the
        records are known: with `expand`, unless some are drafted just in time."""
        self._tell_all()
        rows, won = np.arange(self.slots), promotion.winner >= 0
        tokens, self._owner[:] = promotion.tokens, self._drafter
        self._winner = promotion.winner
        if won.any():
            assert self._branches is not None
            winner = np.maximum(promotion.winner, 0)
            self._owner = np.where(won, self._whose[rows, winner], self._drafter)
            self._winner = np.where(won, self._own[rows, winner], -1).astype(np.int32)
            tokens = np.where(won[:, None], self._branches.tokens[rows, winner], tokens)
        self._promotion = promotion._replace(tokens=tokens)
        self._untold = set(range(len(self._parts)))
        self._branches = None

    def _tell_all(self) -> None:
        for number in sorted(self._untold):
            self._tell(number)

    def _tell(self, number: int) -> None:
        """Gives a part the records, its own branches among them."""
        if number in self._untold:
            winner = np.where(self._owner == number, self._winner, -1)
            self._parts[number].promote(self._promotion._replace(winner=winner))
            self._untold.discard(number)

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        """See `protocols.BranchingDraft.draft`. One part drafts; if it does not answer, the next
        one drafts the next time."""
        number = self._drafter
        self._tell(number)
        wait = self._parts[number].draft(limits, lowered=lowered)

        def drafted() -> np.ndarray:
            found, rows = wait(), limits > 0
            tokens = np.where(rows[:, None], self._parts[number].tokens(), self._promotion.tokens)
            limit = np.where(rows, found, self._promotion.limit)
            self._promotion = self._promotion._replace(tokens=tokens, limit=limit)
            if not found.any():
                self._drafter = (number + 1) % len(self._parts)
            return found

        return drafted

    def tokens(self) -> np.ndarray:
        """See `protocols.BranchingDraft.tokens`."""
        used = np.arange(self.k) < self._promotion.limit[:, None]
        return np.where(used, self._promotion.tokens, 0)

    def proposal(self) -> Proposal:
        """See `protocols.BranchingDraft.proposal`: the q from the parts that made the records."""
        self._tell_all()
        found = [part.proposal() for part in self._parts]
        return Proposal(*(self._of_owners(arrays) for arrays in zip(*found, strict=True)))

    def confidence(self) -> np.ndarray:
        """See `protocols.BranchingDraft.confidence`."""
        return self._of_owners([part.confidence() for part in self._parts])

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
        assert skip is None, "branches are divided once"
        away = [isinstance(each, str) for each in self._told] or [False] * len(self._parts)
        here = [n for n in range(len(self._parts)) if all(away) or not away[n]]
        division = divide(counts, len(here), self._size)
        shares = dict(zip(here, zip(*division, strict=True), strict=True))
        nothing = np.zeros_like(counts), None, np.full((self.slots, self._size), -1)
        whose = np.full((self.slots, self.branches), -1)
        numbers = np.full_like(whose, -1)
        for number, part in enumerate(self._parts):
            # A part that is away is asked too, and may answer.
            own, skip, places = shares.get(number, nothing)
            rows, branches = np.nonzero(places >= 0)
            whose[rows, places[rows, branches]] = number
            numbers[rows, places[rows, branches]] = branches
            made = (self._promotion.limit > 0) & own.any(axis=1)
            self._tell(number)
            part.expand(
                own,
                follow=made & (follow | (self._owner != number)),
                lowered=lowered,
                forwards=forwards,
                skip=skip,
            )
        self._whose, self._own = whose, numbers
        self._told, self._branches = [], None

    def _joined(self, told: Sequence[BranchTokens | Absence]) -> BranchTokens:
        forwards = min(each.forwards for each in present(told))
        joined = no_branches(self.slots, self.branches, self.k, forwards)
        for number, each in enumerate(told):
            if isinstance(each, str):
                continue
            rows, there = np.nonzero(self._whose == number)
            own = self._own[rows, there]
            for array, of_part in zip(joined[:4], each[:4], strict=True):
                array[rows, there] = of_part[rows, own]
        return joined

    def _of_owners(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Each row from the part that made its record."""
        return np.stack(arrays)[self._owner, np.arange(self.slots)]

    def activity(self) -> Activity:
        """What the parts have done since the last call."""
        return joined([part.activity() for part in self._parts])
