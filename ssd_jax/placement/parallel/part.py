"""What drafts that share the work of one have in common."""

from __future__ import annotations

import operator
from abc import abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from typing_extensions import override

from ssd_jax.roles.activity import Activity
from ssd_jax.roles.protocols import BranchingDraft, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import Absence, BranchTokens, RecordRequest
from ssd_jax.sampling.proposal import Proposal


class HostRecordAnswer(RecordAnswer, Protocol):
    """An answer whose tokens and proposals are on the host."""

    def tokens(self) -> np.ndarray:
        """Tokens of all records [B, K], int32, as `RecordAnswer.tokens`."""
        ...

    def parents(self) -> np.ndarray | None:
        """The trees that the tokens are, as `RecordAnswer.parents`."""
        return None

    def proposal(self) -> Proposal:
        """The records' proposals, as `RecordAnswer.proposal`."""
        ...


class Part(BranchingDraft, Protocol):
    """A draft elsewhere, whose tokens and proposals are on the host."""

    @property
    def page_size(self) -> int:
        """Positions of a page; 0 where slots share none."""
        ...

    def lose(self, pages: Sequence[int]) -> None:
        """These pages went to a slot of another part."""
        ...

    def record(self, request: RecordRequest) -> HostRecordAnswer:
        """Gives slots new records, as `BranchingDraft.record`."""
        ...

    def activity(self) -> Activity:
        """What the draft has done since the last call."""
        ...


def join_activities(activities: Sequence[Activity], slots: int = 0) -> Activity:
    """Joins the activity of parallel drafts, ordered by when each span ended.

    Args:
      slots: number of slots of each, where every draft has its own; 0 where all share them.
    """
    spans = [
        span._replace(
            slots=[number * slots + slot for slot in span.slots],
            worker=span.worker * len(activities) + number,
        )
        for number, activity in enumerate(activities)
        for span in activity.spans
    ]
    trips = [activity.round_trip for activity in activities if activity.round_trip is not None]
    return Activity(
        tuple(sorted(spans, key=lambda span: span.end)),
        sum(activity.bytes for activity in activities),
        max(trips, default=None),
    )


class BranchesOfParts(ExpansionAnswer):
    """The branches of several parts.

    If a part no longer answers, its previous answer counts; without one it has no branches.

    Args:
      answers: of the parts.
    """

    def __init__(self, answers: Sequence[ExpansionAnswer]) -> None:
        self._answers = tuple(answers)
        self._latest: list[BranchTokens | Absence] = []  # by part
        self._branches: BranchTokens | None = None  # the same, joined

    @override
    def branches(
        self, forwards: int, until: Callable[[], bool] | None = None
    ) -> BranchTokens | Absence | None:
        """Asks a part that is ahead of the others for as many additional forwards as they are."""
        earlier = present(self._latest)
        extra = forwards - min(part.forwards for part in earlier) if earlier else 0
        latest: list[BranchTokens | Absence] = []
        for number, answer in enumerate(self._answers):
            previous = self._latest[number] if self._latest else "late"
            target_forwards = forwards if isinstance(previous, str) else previous.forwards + extra
            part = answer.branches(target_forwards, until)
            if part is None:
                return None
            latest.append(
                previous if isinstance(part, str) and not isinstance(previous, str) else part
            )
        if not present(latest):
            return latest[0]
        if self._branches is None or not all(map(operator.is_, latest, self._latest)):
            self._latest, self._branches = latest, self.join(latest)
        return self._branches

    @property
    def is_absent(self) -> list[bool]:
        """Which parts had no branches when last asked; none if nobody has asked."""
        return [isinstance(part, str) for part in self._latest] or [False] * len(self._answers)

    @abstractmethod
    def join(self, latest: Sequence[BranchTokens | Absence]) -> BranchTokens:
        """The branches of all parts."""


def present(latest: Sequence[BranchTokens | Absence]) -> list[BranchTokens]:
    """The answers that have branches."""
    return [part for part in latest if not isinstance(part, str)]
