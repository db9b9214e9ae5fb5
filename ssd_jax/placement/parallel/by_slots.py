"""Drafts that share the sequences of a batch: each has its own slots, with all their branches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from typing_extensions import override

from ssd_jax.placement.parallel.part import (
    BranchesOfParts,
    HostRecordAnswer,
    Part,
    joined,
    present,
)
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer
from ssd_jax.roles.records import (
    IDLE,
    Absence,
    BranchTokens,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    SlotOpening,
    no_promotion,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.draft_texts import own_pages


class _Shares(NamedTuple):
    """Slots in parts of `size`; the last parts may have a few that are not used."""

    slots: int
    size: int

    def rows(self, number: int) -> slice:
        """The slots of a part."""
        return slice(*(min(edge * self.size, self.slots) for edge in (number, number + 1)))

    def dealt(self, array: np.ndarray, number: int) -> np.ndarray:
        """A part's rows, with zeros in slots that are not used."""
        rows = array[self.rows(number)]
        missing = self.size - len(rows)
        return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])

    def all(self, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """The rows of all parts, from arrays by part; zeros where a part has none."""
        first = next(iter(arrays.values()))
        rows = np.zeros((self.slots, *first.shape[1:]), first.dtype)
        for number, array in arrays.items():
            of_part = self.rows(number)
            rows[of_part] = array[: of_part.stop - of_part.start]
        return rows


class DraftBySlots(BranchingDraft):
    """Drafts that share the slots.

    Args:
      parts: each with the same number of slots, K and M; the first has the first slots. Together
        they may have a few more slots than are used.
      slots: B.
    """

    def __init__(self, parts: Sequence[Part], slots: int) -> None:
        self._parts = tuple(parts)
        self.slots, self.k, self.branches = slots, parts[0].k, parts[0].branches
        self.page_size = parts[0].page_size
        self._shares = _Shares(slots, parts[0].slots)
        self._pages = [0] * slots  # number of pages of each slot
        self._recorded: set[int] = set()  # parts with a record

    @override
    def open(self, opening: SlotOpening) -> None:
        part, slot = self._of(opening.slot)
        part.open(dataclasses.replace(opening, slot=slot))
        self._pages[opening.slot] = len(opening.pages)
        self.lose(own_pages(opening, self.page_size), owner=part)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        part, row = self._of(slot)
        part.set_pages(row, pages)
        before, self._pages[slot] = self._pages[slot], len(pages)
        self.lose(pages[before:], owner=part)

    def lose(self, pages: Sequence[int], *, owner: Part | None = None) -> None:
        """See `Part.lose`: all slots share the stock of pages, and parts other than the owner may
        have filled these before."""
        for part in self._parts:
            if part is not owner:
                part.lose(pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        part, slot = self._of(slot)
        part.prefill(slot, tokens, offset)

    @override
    def record(self, request: RecordRequest) -> DealtRecords:
        answers: dict[int, HostRecordAnswer] = {}
        for number, part in enumerate(self._parts):
            share = self._share(request.promotion, number)
            live = bool((share.position != IDLE).any())
            if live or number in self._recorded:
                drafts = self._shares.dealt(request.drafts, number)
                lowered = self._shares.dealt(request.lowered, number)
                answers[number] = part.record(RecordRequest(share, drafts, lowered))
            (self._recorded.add if live else self._recorded.discard)(number)
        return DealtRecords(answers, self._shares)

    def _share(self, whole: Promotion, number: int) -> Promotion:
        """The promotion of a part's slots."""
        share = no_promotion(self._shares.size, self.k, whole.committed.shape[1])
        rows = self._shares.rows(number)
        for array, of_all in zip(share, whole, strict=True):
            array[: rows.stop - rows.start] = of_all[rows]
        return share

    @override
    def expand(self, request: ExpansionRequest) -> DealtBranches:
        answers: dict[int, ExpansionAnswer] = {}
        dealt = self._shares.dealt
        for number, part in enumerate(self._parts):
            if request.counts[self._shares.rows(number)].any():
                share = ExpansionRequest(
                    counts=dealt(request.counts, number),
                    follow=dealt(request.follow, number),
                    lowered=dealt(request.lowered, number),
                    forwards=request.forwards,
                    skip=None if request.skip is None else dealt(request.skip, number),
                )
                answers[number] = part.expand(share)
        return DealtBranches(answers, self._shares)

    def activity(self) -> Activity:
        """What the parts have done since the last call."""
        return joined([part.activity() for part in self._parts], self._shares.size)

    @override
    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _of(self, slot: int) -> tuple[Part, int]:
        number, row = divmod(slot, self._shares.size)
        return self._parts[number], row


class DealtRecords(HostRecordAnswer):
    """Records of parts that have their own slots.

    Args:
      answers: of the parts with records, by number.
    """

    def __init__(self, answers: Mapping[int, HostRecordAnswer], shares: _Shares) -> None:
        self._answers, self._shares = answers, shares

    def _all(self, of_part: Callable[[HostRecordAnswer], np.ndarray]) -> np.ndarray:
        return self._shares.all({part: of_part(answer) for part, answer in self._answers.items()})

    @override
    def lengths(self) -> Row:
        """The parts draft in parallel."""
        return self._all(lambda answer: answer.lengths())

    @override
    def tokens(self) -> np.ndarray:
        return self._all(lambda answer: answer.tokens())

    @override
    def confidence(self) -> np.ndarray:
        return self._all(lambda answer: answer.confidence())

    @override
    def proposal(self) -> Proposal:
        proposals = {
            part: [np.asarray(array) for array in answer.proposal()]
            for part, answer in self._answers.items()
        }
        fields = range(len(Proposal._fields))
        return Proposal(
            *(
                self._shares.all({part: p[field] for part, p in proposals.items()})
                for field in fields
            )
        )


class DealtBranches(BranchesOfParts):
    """Branches of parts that have their own slots.

    Args:
      answers: of the parts with branches, by number.
    """

    def __init__(self, answers: Mapping[int, ExpansionAnswer], shares: _Shares) -> None:
        super().__init__(list(answers.values()))
        self._numbers, self._shares = list(answers), shares

    @override
    def joined(self, latest: Sequence[BranchTokens | Absence]) -> BranchTokens:
        first = present(latest)[0]
        nothing = first._replace(
            bonus=np.full_like(first.bonus, -1), lengths=np.zeros_like(first.lengths)
        )
        slots = range(self._shares.slots)
        of_part = dict.fromkeys((slot // self._shares.size for slot in slots), nothing)
        absent: dict[int, Absence] = {}
        for number, part in zip(self._numbers, latest, strict=True):
            if isinstance(part, str):
                rows = self._shares.rows(number)
                absent |= dict.fromkeys(range(rows.start, rows.stop), part)
            else:
                of_part[number] = part
        arrays = [
            self._shares.all({number: branches[:4][field] for number, branches in of_part.items()})
            for field in range(4)
        ]
        forwards = min(part.forwards for part in present(latest))
        return BranchTokens(*arrays, forwards=forwards, absent=absent)
