"""What drafts that share the work of one have in common."""

from __future__ import annotations

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


def ask(
    parts: Sequence[Part],
    forwards: int,
    until: Callable[[], bool] | None,
    told: Sequence[BranchTokens | Absence],
) -> list[BranchTokens | Absence] | None:
    """Asks each part for the branches of its expansion: see `BranchingDraft.branch_tokens`.

    A part that is ahead of the others is asked for as many additional forwards as they are. If a
    part no longer answers, its previous answer counts.

    Args:
      told: their previous answers for the same expansion; empty if they were not asked.
    """
    here = present(told)
    more = forwards - min(each.forwards for each in here) if here else 0
    found = []
    for number, part in enumerate(parts):
        before = told[number] if told else "late"
        ahead = forwards if isinstance(before, str) else before.forwards + more
        answer = part.branch_tokens(ahead, until)
        if answer is None:
            return None
        found.append(before if isinstance(answer, str) and not isinstance(before, str) else answer)
    return found


def present(told: Sequence[BranchTokens | Absence]) -> list[BranchTokens]:
    """The answers that have branches."""
    return [each for each in told if not isinstance(each, str)]
