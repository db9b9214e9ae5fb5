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
    join_activities,
    present,
)
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer
from ssd_jax.roles.records import (
    IDLE,
    Absence,
    BranchTokens,
    BranchTrees,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    SlotOpening,
    no_promotion,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.draft_texts import own_pages


class SlotSplit(NamedTuple):
    """Slots in parts of `size`; the last parts may have a few that are not used."""

    slots: int
    size: int

    def rows(self, number: int) -> slice:
        """The slots of a part."""
        return slice(*(min(edge * self.size, self.slots) for edge in (number, number + 1)))

    def rows_of_part(self, array: np.ndarray, number: int) -> np.ndarray:
        """A part's rows, with zeros in slots that are not used."""
        rows = array[self.rows(number)]
        missing = self.size - len(rows)
        return np.concatenate([rows, np.zeros((missing, *rows.shape[1:]), rows.dtype)])

    def all_rows(self, arrays: Mapping[int, np.ndarray]) -> np.ndarray:
        """The rows of all parts, from arrays by part; zeros where a part has none."""
        sample = next(iter(arrays.values()))
        rows = np.zeros((self.slots, *sample.shape[1:]), sample.dtype)
        for number, array in arrays.items():
            of_part = self.rows(number)
            rows[of_part] = array[: of_part.stop - of_part.start]
        return rows

    def all_fields(self, tuples: Mapping[int, Sequence[np.ndarray]]) -> list[np.ndarray]:
        """`all_rows` of each field, from tuples of arrays by part."""
        fields = zip(*tuples.values(), strict=True)
        return [self.all_rows(dict(zip(tuples, arrays, strict=True))) for arrays in fields]


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
        self.nodes = parts[0].nodes
        self.page_size = parts[0].page_size
        self._split = SlotSplit(slots, parts[0].slots)
        self._pages = [0] * slots  # number of pages of each slot
        self._parts_with_record: set[int] = set()  # parts with a record

    @override
    def open(self, opening: SlotOpening) -> None:
        part, slot = self._locate(opening.slot)
        part.open(dataclasses.replace(opening, slot=slot))
        self._pages[opening.slot] = len(opening.pages)
        self.lose(own_pages(opening, self.page_size), owner=part)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        part, row = self._locate(slot)
        part.set_pages(row, pages)
        num_before, self._pages[slot] = self._pages[slot], len(pages)
        self.lose(pages[num_before:], owner=part)

    def lose(self, pages: Sequence[int], *, owner: Part | None = None) -> None:
        """These pages went to a slot of the owner: all slots share the stock of pages, and the
        other parts may have filled these before."""
        for part in self._parts:
            if part is not owner:
                part.lose(pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        part, slot = self._locate(slot)
        part.prefill(slot, tokens, offset)

    @override
    def record(self, request: RecordRequest) -> RecordsBySlots:
        answers: dict[int, HostRecordAnswer] = {}
        for number, part in enumerate(self._parts):
            share = self._share(request.promotion, number)
            live = bool((share.position != IDLE).any())
            if live or number in self._parts_with_record:
                drafts = self._split.rows_of_part(request.drafts, number)
                lowered = self._split.rows_of_part(request.lowered, number)
                answers[number] = part.record(RecordRequest(share, drafts, lowered))
            (self._parts_with_record.add if live else self._parts_with_record.discard)(number)
        return RecordsBySlots(answers, self._split)

    def _share(self, all_slots: Promotion, number: int) -> Promotion:
        """The promotion of a part's slots."""
        width = all_slots.committed.shape[1]
        share = no_promotion(self._split.size, self.k, width, self.nodes)
        rows = self._split.rows(number)
        for array, of_all in zip(share, all_slots, strict=True):
            if array is not None and of_all is not None:
                array[: rows.stop - rows.start] = of_all[rows]
        return share

    @override
    def expand(self, request: ExpansionRequest) -> BranchesBySlots:
        answers: dict[int, ExpansionAnswer] = {}
        rows_of_part = self._split.rows_of_part
        for number, part in enumerate(self._parts):
            if request.counts[self._split.rows(number)].any():
                share = ExpansionRequest(
                    counts=rows_of_part(request.counts, number),
                    follow=rows_of_part(request.follow, number),
                    lowered=rows_of_part(request.lowered, number),
                    forwards=request.forwards,
                    skip=None if request.skip is None else rows_of_part(request.skip, number),
                    share=request.share,
                )
                answers[number] = part.expand(share)
        return BranchesBySlots(answers, self._split)

    def activity(self) -> Activity:
        """What the parts have done since the last call."""
        return join_activities([part.activity() for part in self._parts], self._split.size)

    @override
    def close(self) -> None:
        for part in self._parts:
            part.close()

    def _locate(self, slot: int) -> tuple[Part, int]:
        number, row = divmod(slot, self._split.size)
        return self._parts[number], row


class RecordsBySlots(HostRecordAnswer):
    """Records of parts that have their own slots.

    Args:
      answers: of the parts with records, by number.
    """

    def __init__(self, answers: Mapping[int, HostRecordAnswer], split: SlotSplit) -> None:
        self._answers, self._split = answers, split

    def _all(self, of_part: Callable[[HostRecordAnswer], np.ndarray]) -> np.ndarray:
        return self._split.all_rows(
            {part: of_part(answer) for part, answer in self._answers.items()}
        )

    @override
    def lengths(self) -> Row:
        """The parts draft in parallel."""
        return self._all(lambda answer: answer.lengths())

    @override
    def tokens(self) -> np.ndarray:
        return self._all(lambda answer: answer.tokens())

    @override
    def parents(self) -> np.ndarray | None:
        of_parts = {part: answer.parents() for part, answer in self._answers.items()}
        trees = {part: parents for part, parents in of_parts.items() if parents is not None}
        return self._split.all_rows(trees) if trees else None

    @override
    def confidence(self) -> np.ndarray:
        return self._all(lambda answer: answer.confidence())

    @override
    def proposal(self) -> Proposal:
        proposals = {
            part: [np.asarray(array) for array in answer.proposal()]
            for part, answer in self._answers.items()
        }
        return Proposal(*self._split.all_fields(proposals))


class BranchesBySlots(BranchesOfParts):
    """Branches of parts that have their own slots.

    Args:
      answers: of the parts with branches, by number.
    """

    def __init__(self, answers: Mapping[int, ExpansionAnswer], split: SlotSplit) -> None:
        super().__init__(list(answers.values()))
        self._numbers, self._split = list(answers), split

    @override
    def join(self, latest: Sequence[BranchTokens | Absence]) -> BranchTokens:
        sample = present(latest)[0]
        empty = sample._replace(
            bonus=np.full_like(sample.bonus, -1), lengths=np.zeros_like(sample.lengths)
        )
        slots = range(self._split.slots)
        of_part = dict.fromkeys((slot // self._split.size for slot in slots), empty)
        absent: dict[int, Absence] = {}
        for number, part in zip(self._numbers, latest, strict=True):
            if isinstance(part, str):
                rows = self._split.rows(number)
                absent |= dict.fromkeys(range(rows.start, rows.stop), part)
            else:
                of_part[number] = part
        arrays = self._split.all_fields({number: part[:4] for number, part in of_part.items()})
        forwards, trees = min(part.forwards for part in present(latest)), None
        trees_of = {number: part.trees for number, part in of_part.items() if part.trees}
        if trees_of:
            trees = BranchTrees(*self._split.all_fields(trees_of))
        return BranchTokens(*arrays, forwards=forwards, absent=absent, trees=trees)
