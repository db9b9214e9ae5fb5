"""Drafts that share the branches of every sequence.

Each part has all slots and texts, and speculates for its own outcomes. The part whose branch comes
true promotes it to its record; the others get the tokens and follow, which takes one more forward.
If a part does not answer, its outcomes are divided over the others in the next round.

The outcomes of chains are divided by the fan-out; of those of trees, which a part chooses itself,
each has a share of its own (`roles.Share`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Int
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
    Absence,
    BranchTokens,
    ExpansionRequest,
    RecordRequest,
    Row,
    Share,
    SlotOpening,
    no_branches,
    record_request,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.division import divide


class _PartShare(NamedTuple):
    """What a part has branches for; see `Division` and `ExpansionRequest`."""

    counts: Int[np.ndarray, "B F"]
    skip: Int[np.ndarray, "B F"] | None
    places: Int[np.ndarray, "B m"]
    share: Share = Share()


class DraftByBranches(BranchingDraft):
    """Drafts that share the branches.

    Args:
      parts: with the same slots, K and M; their records have candidates for the branches of all.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        first_part = parts[0]
        self._parts = tuple(parts)
        self.slots, self.k, self.page_size = first_part.slots, first_part.k, first_part.page_size
        self.nodes, self._size = first_part.nodes, first_part.branches
        # A part without an outcome of k = L still has a branch there, unless proposals are trees.
        self.branches = len(parts) * self._size - (0 if self.nodes else len(parts) - 1)
        self._drafter = 0  # number of the part that drafts just in time
        self._records: SharedRecords | None = None
        self._expansion: SharedBranches | None = None

    @override
    def open(self, opening: SlotOpening) -> None:
        for part in self._parts:
            part.open(opening)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        for part in self._parts:
            part.set_pages(slot, pages)

    def lose(self, pages: Sequence[int]) -> None:
        """These pages went to a slot of another part, for all parts."""
        for part in self._parts:
            part.lose(pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        for part in self._parts:
            part.prefill(slot, tokens, offset)

    @override
    def record(self, request: RecordRequest) -> SharedRecords:
        winner, rows = request.promotion.winner, np.arange(self.slots)
        has_winner, owner = winner >= 0, np.full(self.slots, self._drafter)
        if has_winner.any():
            expansion, number = self._expansion, np.maximum(winner, 0)
            assert expansion is not None
            owner = np.where(has_winner, expansion.part[rows, number], owner)
            winner = np.where(has_winner, expansion.number[rows, number], -1).astype(np.int32)
        request = request._replace(promotion=request.promotion._replace(winner=winner))
        self._records = SharedRecords(
            self._parts, request, owner, self._drafter, self._use_next_drafter
        )
        return self._records

    def _use_next_drafter(self) -> None:
        """The next part drafts just in time from now on, since this one does not answer."""
        self._drafter = (self._drafter + 1) % len(self._parts)

    @override
    def expand(self, request: ExpansionRequest) -> SharedBranches:
        assert request.skip is None, "branches are divided once"
        assert self._records is not None
        counts, records, count = request.counts, self._records, len(self._parts)
        is_absent = self._expansion.is_absent if self._expansion else [False] * count
        active = [number for number in range(count) if all(is_absent) or not is_absent[number]]
        shares = dict(zip(active, self._shares(counts, len(active)), strict=True))
        no_share = _PartShare(np.zeros_like(counts), None, np.full((self.slots, self._size), -1))
        part_of = np.full((self.slots, self.branches), -1)
        number_of, answers = np.full_like(part_of, -1), []
        for number, part in enumerate(self._parts):
            # A part that is away is asked too, and may answer.
            part_counts, skip, places, share = shares.get(number, no_share)
            rows, branches = np.nonzero(places >= 0)
            part_of[rows, places[rows, branches]] = number
            number_of[rows, places[rows, branches]] = branches
            has_record = (records.limit > 0) & part_counts.any(axis=1)
            follow = has_record & (request.follow | (records.owner != number))
            answers.append(
                part.expand(
                    request._replace(counts=part_counts, follow=follow, skip=skip, share=share)
                )
            )
        sizes = self.slots, self.k, self.nodes
        self._expansion = SharedBranches(answers, sizes, part_of, number_of)
        return self._expansion

    def _shares(self, counts: np.ndarray, parts: int) -> list[_PartShare]:
        """The shares of so many parts."""
        if not self.nodes:
            division = divide(counts, parts, self._size)
            return [_PartShare(*share) for share in zip(*division, strict=True)]
        counts = np.minimum(-(-counts // parts), self._size)
        places = np.broadcast_to(np.arange(self._size) * parts, (self.slots, self._size))
        return [
            _PartShare(counts, None, places + number, Share(number, parts))
            for number in range(parts)
        ]

    def activity(self) -> Activity:
        """What the parts have done since the last call."""
        return join_activities([part.activity() for part in self._parts])

    @override
    def close(self) -> None:
        for part in self._parts:
            part.close()


class SharedRecords(HostRecordAnswer):
    """Records that every part has, each made by one of them, its owner.

    One part drafts just in time; the others get the records once its tokens are known.

    Args:
      parts: all of them.
      request: with the winners in their owners' numbers.
      owner: number of the part that makes each record [B].
      drafter: number of the part that drafts just in time.
      on_no_answer: called if it does not answer.

    Attributes:
      owner: number of the part that makes each record [B].
    """

    def __init__(
        self,
        parts: Sequence[Part],
        request: RecordRequest,
        owner: np.ndarray,
        drafter: int,
        on_no_answer: Callable[[], None],
    ) -> None:
        self._parts, self.owner, self._on_no_answer = parts, owner, on_no_answer
        self._promotion, self._drafts = request.promotion, request.drafts
        self._drafter = drafter
        self._lengths: Row | None = None
        self._answers: dict[int, HostRecordAnswer] = {}
        self._record(drafter, request)
        if not self._drafts.any():
            self._lengths = np.zeros_like(self._drafts)
            self._record_others()

    @property
    def limit(self) -> Row:
        """Number of tokens of each record [B]."""
        return self._promotion.limit

    def _record(self, number: int, request: RecordRequest) -> None:
        """Gives a part the records, those of its own branches among them."""
        winner = np.where(self.owner == number, request.promotion.winner, -1)
        promotion = request.promotion._replace(winner=winner)
        self._answers[number] = self._parts[number].record(request._replace(promotion=promotion))

    def _record_others(self) -> None:
        for number in range(len(self._parts)):
            if number != self._drafter:
                self._record(number, record_request(self._promotion))

    @override
    def lengths(self) -> Row:
        if self._lengths is None:
            answer, drafted = self._answers[self._drafter], self._drafts > 0
            lengths, promotion = answer.lengths(), self._promotion
            counts, parents = lengths, promotion.parents
            drafted_parents = answer.parents()
            if parents is not None and drafted_parents is not None:
                counts = np.asarray(answer.proposal().length)
                parents = np.where(drafted[:, None], drafted_parents, parents)
            self._promotion = promotion._replace(
                tokens=np.where(drafted[:, None], answer.tokens(), promotion.tokens),
                limit=np.where(drafted, counts, promotion.limit),
                parents=parents,
            )
            if not lengths.any():
                self._on_no_answer()
            self._lengths = lengths
            self._record_others()
        return self._lengths

    @override
    def tokens(self) -> np.ndarray:
        tokens, limit = self._promotion.tokens, self._promotion.limit
        return np.where(np.arange(tokens.shape[1]) < limit[:, None], tokens, 0)

    @override
    def parents(self) -> np.ndarray | None:
        return self._promotion.parents

    @override
    def proposal(self) -> Proposal:
        """The q from the parts that made the records."""
        proposals = [answer.proposal() for _, answer in sorted(self._answers.items())]
        return Proposal(*(self._of_owners(arrays) for arrays in zip(*proposals, strict=True)))

    @override
    def confidence(self) -> np.ndarray:
        answers = sorted(self._answers.items())
        return self._of_owners([answer.confidence() for _, answer in answers])

    def _of_owners(self, arrays: Sequence[np.ndarray]) -> np.ndarray:
        """Each row from the part that made its record."""
        return np.stack(arrays)[self.owner, np.arange(len(self.owner))]


class SharedBranches(BranchesOfParts):
    """Branches of every sequence, divided over the parts.

    Args:
      answers: of the parts.
      sizes: B, K and, of trees, m.
      part, number: for each branch [B, M], the part that makes it (-1 for none) and its number
        there.
    """

    def __init__(
        self,
        answers: Sequence[ExpansionAnswer],
        sizes: tuple[int, int, int],
        part: np.ndarray,
        number: np.ndarray,
    ) -> None:
        super().__init__(answers)
        self._sizes, self.part, self.number = sizes, part, number

    @override
    def join(self, latest: Sequence[BranchTokens | Absence]) -> BranchTokens:
        slots, k, nodes = self._sizes
        forwards = min(part.forwards for part in present(latest))
        branches = no_branches(slots, self.part.shape[1], k, forwards, nodes)
        for number, part in enumerate(latest):
            if isinstance(part, str):
                continue
            rows, places = np.nonzero(self.part == number)
            numbers = self.number[rows, places]
            of_trees = zip(branches.trees or (), part.trees or (), strict=True)
            for array, of_part in (*zip(branches[:4], part[:4], strict=True), *of_trees):
                array[rows, places] = of_part[rows, numbers]
        return branches
