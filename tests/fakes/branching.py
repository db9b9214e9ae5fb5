"""A scripted draft that branches: the controller of SSD without JAX."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.roles.records import BranchTokens, Drafted, Promotion, SlotOpening, pad_rows
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.testing.by_row import Promoted, promoted
from tests.fakes.branches import Branch, Record, as_branch_tokens
from tests.fakes.stepwise import StepwiseDraft

Script = Callable[[Sequence[int], int], int]
FILLER = 1000
"""What a candidate that the script does not ask for lies above the right token."""


@dataclasses.dataclass(frozen=True)
class Expansion:
    """The arguments of an `expand`, by slot with a record, and the L of each record."""

    lengths: dict[int, int]
    counts: dict[int, tuple[int, ...]]
    follow: dict[int, bool]
    lowered: set[tuple[int, ...]]
    forwards: int


class FakeBranchingDraft(StepwiseDraft):
    """See `protocols.BranchingDraft`; it refuses whatever the protocol does not allow.

    It drafts the script's own tokens, one above them where `wrong(position)` says so, whatever came
    before. It keeps the text of every slot and checks that each move joins on without a gap.

    Args:
      script: as of `FakeTarget`.
      rank: place of the right bonus token among the candidates, by (prompt, position); None is
        nowhere.
      width: how many candidates a place has.
      confidence: the draft's in the token at a position.
      budget: branches that every record must get; None is all of them.
    """

    def __init__(
        self,
        script: Script,
        *,
        slots: int = 2,
        k: int = 3,
        branches: int = 8,
        budget: int | None = None,
        wrong: Callable[[int], bool] = lambda position: False,
        rank: Callable[[Sequence[int], int], int | None] = lambda prompt, position: 0,
        width: int = 99,
        confidence: Callable[[int], int] = lambda position: 7,
    ) -> None:
        self.slots, self.k, self.branches = slots, k, branches
        self._script, self._wrong, self._rank, self._width = script, wrong, rank, width
        self._confidence = confidence
        self._budget = branches if budget is None else budget
        self._texts: list[list[int]] = [[] for _ in range(slots)]
        self._prompts, self._most = [0] * slots, [0] * slots  # their lengths, so far and in all
        self.pages: dict[int, tuple[int, ...]] = {}
        self._new: set[int] = set()  # slots whose request has had no record yet
        self._records: dict[int, Record] = {}
        self._branches: dict[int, list[Branch | None]] = {}
        self._unread = False  # whether nobody has asked for the branches
        self.calls: list[str] = []
        self.moves: list[list[Promoted]] = []
        self.drafted: list[dict[int, int]] = []
        self.expansions: list[Expansion] = []

    def open(self, opening: SlotOpening) -> None:
        """What the slot's last request left behind stays, as it does on a device."""
        slot = opening.slot
        self._texts[slot], self._prompts[slot], self._most[slot] = [], 0, opening.prompt
        self.pages[slot] = tuple(opening.pages)
        self._new.add(slot)
        self.calls.append("open")

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self.pages[slot] = tuple(pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        assert tokens
        self._new.add(slot)  # what it had goes, where rounds did without it
        self._records.pop(slot, None)
        assert offset == len(self._texts[slot])
        self._texts[slot] += tokens
        self._prompts[slot] = min(len(self._texts[slot]), self._most[slot])
        self.calls.append("prefill")

    def promote(self, promotion: Promotion) -> None:
        moves = promoted(promotion)
        assert moves, "a call for nothing"
        records = {moved.slot: self._moved(moved) for moved in moves}
        self._records, self._branches, self._unread = records, {}, False
        self.calls.append("promote")
        self.moves.append(moves)

    def _moved(self, moved: Promoted) -> Record:
        slot = moved.slot
        text = self._texts[slot]
        text[moved.position + 1 - len(moved.committed) :] = moved.committed  # perhaps once more
        assert (moved.position, moved.pending) == (len(text) - 1, text[-1])
        if slot in self._new:
            assert moved.winner < 0
        else:
            assert slot in self._records, "a slot that had a record has none"
            # The same place again is an interrupted round, done once more.
            assert moved.committed or moved.position == self._records[slot].start
        self._new.discard(slot)
        if moved.winner < 0:
            assert moved.limit == 0
            assert len(moved.tokens) <= self.k
            return Record(moved.position, list(moved.tokens), bool(moved.tokens), False)
        assert not moved.tokens
        assert 0 <= moved.limit <= self.k
        branch = self._branches[slot][moved.winner]
        assert branch is not None, "no such branch"
        path = text[self._records[slot].start + 1 :]
        assert branch.path == path, "the branch is not of this outcome"
        return Record(moved.position, branch.tokens[: moved.limit], False, True)

    def draft(self, limits: np.ndarray, *, lowered: np.ndarray) -> Callable[[], np.ndarray]:
        assert limits.shape == (self.slots,)
        assert lowered.shape == (self.slots, self.k)
        waiting = {slot: int(limit) for slot, limit in enumerate(limits) if limit}
        assert waiting, "a call for nothing"
        assert not self._branches, "the records have branches already"
        for slot, limit in waiting.items():
            record = self._records[slot]
            assert not record.won
            assert not record.tokens
            assert 1 <= limit <= self.k
            record.tokens = self._drafted(slot, record.start + 1, limit)
        self.calls.append("draft")
        self.drafted.append(waiting)
        return lambda: limits

    def tokens(self) -> np.ndarray:
        rows = {slot: record.tokens for slot, record in self._records.items()}
        return pad_rows(rows, self.slots, self.k)

    def proposal(self) -> Drafted:
        """With tokens alone."""
        self.calls.append("proposal")
        return Drafted(np.zeros(self.slots, np.int32), self.tokens())

    def confidence(self) -> np.ndarray:
        """Of drafted tokens alone; others are unknown."""
        assert self.calls[-1] == "draft", "not of tokens drafted in this round"
        self.calls.append("confidence")
        found = np.full((self.slots, self.k), UNKNOWN, np.int32)
        for slot in self.drafted[-1]:
            record = self._records[slot]
            for place in range(len(record.tokens)):
                found[slot, place] = self._confidence(record.start + 1 + place)
        return found

    def branch_off(
        self,
        counts: np.ndarray,
        *,
        follow: np.ndarray,
        lowered: np.ndarray,
        forwards: int,
        skip: np.ndarray | None = None,
    ) -> None:
        assert skip is None
        assert self._records, "a call for nothing"
        assert not self._branches, "the records have branches already"
        assert counts.any(), "a call for nothing"
        assert counts.shape == (self.slots, self.k + 1)
        assert follow.shape == (self.slots,)
        assert lowered.shape == (self.slots, self.k)
        assert counts.min() >= 0
        assert 1 <= forwards <= self.k + 1
        for slot in range(self.slots):
            forks = counts[slot].tolist()
            record = None if slot in self._new else self._records.get(slot)
            if record is None or not any(forks):
                assert not any(forks)
                assert not follow[slot]
                continue
            last = len(record.tokens)
            assert sum(forks) == sum(forks[: last + 1]) == self._budget
            assert forks[last] >= 1
            assert bool(follow[slot]) == record.host
            self._branches[slot] = [
                self._branch(slot, record, k, rank, forwards)
                for k, count in enumerate(forks)
                for rank in range(count)
            ]
        lengths = {slot: len(self._records[slot].tokens) for slot in self._branches}
        self._unread = True
        self.calls.append("expand")
        self.expansions.append(
            Expansion(
                lengths,
                {slot: tuple(counts[slot, : last + 1].tolist()) for slot, last in lengths.items()},
                {slot: bool(follow[slot]) for slot in lengths},
                {tuple(lowered[slot].tolist()) for slot in lengths},
                forwards,
            )
        )

    def branch_tokens(self, forwards: int, until=None) -> BranchTokens:
        assert forwards == 1
        assert self._branches, "there are none"
        if not self._unread:
            return self._on_host
        self._unread = False
        self.calls.append("branch_tokens")
        shape = self.slots, self.branches, self.k
        self._on_host = as_branch_tokens(
            self._branches,
            shape,
            self.expansions[-1].forwards,
            lambda slot, branch, place: self._confidence(
                len(self._texts[slot]) + len(branch.path) + place
            ),
        )
        return self._on_host

    def _branch(self, slot: int, record: Record, k: int, rank: int, forwards: int) -> Branch | None:
        """The tail rule: branches of k = L start one forward later."""
        drafted = record.tokens[k] if k < len(record.tokens) else None
        position = record.start + k + 1
        bonus = self._candidate(slot, position, rank, drafted)
        if bonus is None:
            return None
        count = min(forwards - (drafted is None), self.k)
        return Branch([*record.tokens[:k], bonus], self._drafted(slot, position + 1, count))

    def _candidate(self, slot: int, position: int, rank: int, drafted: int | None) -> int | None:
        """A candidate at a position where `drafted` cannot be the bonus token."""
        if rank >= self._width:
            return None
        right, place = self._right(slot, position), self._rank(self._prompt(slot), position)
        return right if rank == place and right != drafted else right + FILLER + rank

    def _drafted(self, slot: int, position: int, count: int) -> list[int]:
        return [self._right(slot, at) + self._wrong(at) for at in range(position, position + count)]

    def _right(self, slot: int, position: int) -> int:
        return self._script(self._prompt(slot), position)

    def _prompt(self, slot: int) -> list[int]:
        return self._texts[slot][: self._prompts[slot]]


class GrowingBranches(FakeBranchingDraft):
    """A draft whose first answers come before the branches have all their tokens."""

    def branch_tokens(self, forwards: int, until=None) -> BranchTokens:
        found = super().branch_tokens(1)
        if forwards == 1:
            return found._replace(lengths=found.lengths.clip(max=1), forwards=1)
        return found
