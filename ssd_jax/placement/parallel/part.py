"""What drafts that share the work of one have in common."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from ssd_jax.roles.activity import Activity
from ssd_jax.roles.protocols import BranchingDraft
from ssd_jax.roles.records import Absence, BranchTokens
from ssd_jax.sampling.proposal import Proposal


class Part(BranchingDraft, Protocol):
    """A draft elsewhere, whose tokens and proposals are on the host.

    Attributes:
      page_size: positions of a page; 0 where slots share none.
    """

    page_size: int

    def lose(self, pages: Sequence[int]) -> None:
        """These pages went to a slot of another part."""
        ...

    def tokens(self) -> np.ndarray:
        """See `BranchingDraft.tokens`."""
        ...

    def proposal(self) -> Proposal:
        """See `BranchingDraft.proposal`."""
        ...

    def activity(self) -> Activity:
        """What the draft has done since the last call."""
        ...

    def close(self) -> None:
        """Ends the draft, which is no longer needed."""
        ...


def joined(told: Sequence[Activity], slots: int = 0) -> Activity:
    """Joins the activity of parallel drafts, ordered by when each span ended.

    Args:
      slots: number of slots of each, where every draft has its own; 0 where all share them.
    """
    spans = [
        span._replace(
            slots=[number * slots + slot for slot in span.slots],
            worker=span.worker * len(told) + number,
        )
        for number, each in enumerate(told)
        for span in each.spans
    ]
    return Activity(
        tuple(sorted(spans, key=lambda span: span.end)),
        sum(each.bytes for each in told),
        max((each.round_trip for each in told if each.round_trip is not None), default=None),
    )


class DraftOfParts(ABC):
    """A draft whose parts share the branches, or the sequences.

    If a part no longer answers, its previous answer counts.

    Args:
      parts: all of them.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        self._parts = tuple(parts)
        # Of this expansion, by the parts that have it.
        self._told: list[BranchTokens | Absence] = []
        self._branches: BranchTokens | None = None  # the same, joined

    def branch_tokens(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """See `protocols.BranchingDraft.branch_tokens`. A part that does not answer has no
        branches; those of the others are returned. A part that is ahead of the others is asked for
        as many additional forwards as they are."""
        here = present(self._told)
        more = forwards - min(each.forwards for each in here) if here else 0
        told: list[BranchTokens | Absence] = []
        for number, part in enumerate(self._expanding()):
            before = self._told[number] if self._told else "late"
            ahead = forwards if isinstance(before, str) else before.forwards + more
            answer = part.branch_tokens(ahead, until)
            if answer is None:
                return None
            told.append(
                before if isinstance(answer, str) and not isinstance(before, str) else answer
            )
        if not present(told):
            return told[0]
        if self._branches is None or not all(map(operator.is_, told, self._told)):
            self._told, self._branches = told, self._joined(told)
        return self._branches

    def close(self) -> None:
        """Closes all parts."""
        for part in self._parts:
            part.close()

    def _expanding(self) -> Sequence[Part]:
        """The parts that have the expansion."""
        return self._parts

    @abstractmethod
    def _joined(self, told: Sequence[BranchTokens | Absence]) -> BranchTokens:
        """The branches of all parts, from what those with the expansion have told."""


def present(told: Sequence[BranchTokens | Absence]) -> list[BranchTokens]:
    """The answers that have branches."""
    return [each for each in told if not isinstance(each, str)]
