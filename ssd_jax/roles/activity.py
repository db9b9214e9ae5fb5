"""When target and draft were at work, and how much of the draft's work the target hid.

Times are seconds of the engine's clock. The target counts as busy from the dispatch of a program
until the last outcome that was dispatched by then has been read. No thread watches the device: that
span has the host's dispatch (a fraction of a millisecond) at its beginning, and, where the host
comes to read late, what the device then waits for it at its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Reversible
from typing import NamedTuple

FORWARDS = ("expand", "grow")
"""Kinds of work that are one draft forward of all branches."""
WORK = ("prefill", "draft", "promote", *FORWARDS)
"""All kinds of work."""

_KEPT = 64  # spans of the target; a draft that is later than that hides nothing


class Busy(NamedTuple):
    """A piece of a draft's work.

    Attributes:
      what: "prefill", "draft" (just in time), "promote" (a winner's keys and values, its q read),
        or one of `FORWARDS`; a wait for the device ends each.
      begin, end: seconds.
      slots: whose.
      worker: that did it, where several drafts share the work.
    """

    what: str
    begin: float
    end: float
    slots: Collection[int] = ()
    worker: int = 0


class Activity(NamedTuple):
    """What a draft elsewhere has done since it was last asked.

    Attributes:
      spans: its work, as far as it has been told.
      bytes: sent to it and received from it, without what the transport adds.
      round_trip: seconds that messages there and back take lately, at least; None where that is
        not known.
    """

    spans: tuple[Busy, ...] = ()
    bytes: int = 0
    round_trip: float | None = None


class DraftCost(NamedTuple):
    """What the proposal of one slot has cost the draft.

    Attributes:
      busy, hidden: seconds of work for this slot (and others beside it), and how many of them ran
        while the target was busy.
      steps: seconds of each forward of the branches.
      bytes: see `Activity.bytes`, of all slots.
      round_trip: see `Activity.round_trip`.
    """

    busy: float
    hidden: float
    steps: tuple[float, ...]
    bytes: int
    round_trip: float | None = None


class TargetTimes:
    """When the target was busy lately."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._since: float | None = None

    def idle(self) -> None:
        """Nothing that was dispatched will be read."""
        self._since = None

    def dispatched(self, now: float) -> None:
        """A program was dispatched."""
        if self._since is None:
            self._since = now

    def read(self, now: float, *, more: bool) -> tuple[float, float]:
        """An outcome has been read; `more` says whether another one is on its way.

        Returns: when the target was busy with it: (begin, end).
        """
        begin = now if self._since is None else self._since
        self._since = now if more else None
        self._spans.append((begin, now))
        return begin, now

    def cost(self, slot: int, activity: Activity) -> DraftCost:
        """What the draft's work has cost a slot."""
        spans = [span for span in activity.spans if slot in span.slots]
        return DraftCost(
            busy=sum(span.end - span.begin for span in spans),
            hidden=sum(overlap(span.begin, span.end, self._spans) for span in spans),
            steps=tuple(span.end - span.begin for span in spans if span.what in FORWARDS),
            bytes=activity.bytes,
            round_trip=activity.round_trip,
        )


def overlap(begin: float, end: float, others: Reversible[tuple[float, float]]) -> float:
    """Seconds of one span that lie within others, which come one after the other."""
    seconds = 0.0
    for first, last in reversed(others):
        if last <= begin:
            break  # so are all before it
        seconds += max(0.0, min(end, last) - max(begin, first))
    return seconds
