"""When target and draft were busy, and how much of the draft's work the target hid.

Times are seconds of the engine's clock. The target counts as busy from the dispatch of a program
until the last outcome that was dispatched by then has been read. No thread watches the device, so
that span begins with the host's dispatch (a fraction of a millisecond), and, where the host reads
late, it ends with the device's wait for the host.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Reversible
from typing import NamedTuple

FORWARDS = ("expand", "grow")
"""Kinds of work that are one draft forward of all branches."""
WORK = ("prefill", "draft", "promote", *FORWARDS)
"""All kinds of work."""

_KEPT = 64  # spans of the target; draft work reported later than that counts as not hidden


class Busy(NamedTuple):
    """A piece of a draft's work.

    Attributes:
      what: "prefill", "draft" (just in time), "promote" (a winner's keys and values, its q read),
        or one of `FORWARDS`; each ends with a wait for the device.
      begin, end: seconds.
      slots: slots that the work was for.
      worker: number of the draft that did it, where several share the work.
    """

    what: str
    begin: float
    end: float
    slots: Collection[int] = ()
    worker: int = 0


class Activity(NamedTuple):
    """Work of a draft elsewhere since it was last asked.

    Attributes:
      spans: its work, as far as it has been reported.
      bytes: sent to it and received from it, without the transport's overhead.
      round_trip: least seconds that recent messages took there and back; None where that is not
        known.
    """

    spans: tuple[Busy, ...] = ()
    bytes: int = 0
    round_trip: float | None = None


class DraftCost(NamedTuple):
    """Cost of one slot's proposal to the draft.

    Attributes:
      busy, hidden: seconds of work for this slot (and others beside it), and the seconds of it
        that ran while the target was busy.
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
    """Recent spans in which the target was busy."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_KEPT)
        self._since: float | None = None

    def idle(self) -> None:
        """Marks that no dispatched program will be read."""
        self._since = None

    def dispatched(self, now: float) -> None:
        """Marks that a program was dispatched."""
        if self._since is None:
            self._since = now

    def read(self, now: float, *, more: bool) -> tuple[float, float]:
        """Marks that an outcome was read; `more` if another one is in flight.

        Returns: when the target was busy with it: (begin, end).
        """
        begin = now if self._since is None else self._since
        self._since = now if more else None
        self._spans.append((begin, now))
        return begin, now

    def cost(self, slot: int, activity: Activity) -> DraftCost:
        """The cost of the draft's work for a slot."""
        spans = [span for span in activity.spans if slot in span.slots]
        return DraftCost(
            busy=sum(span.end - span.begin for span in spans),
            hidden=sum(overlap(span.begin, span.end, self._spans) for span in spans),
            steps=tuple(span.end - span.begin for span in spans if span.what in FORWARDS),
            bytes=activity.bytes,
            round_trip=activity.round_trip,
        )


def overlap(begin: float, end: float, others: Reversible[tuple[float, float]]) -> float:
    """Seconds of one span that lie within others, which are in order and do not overlap."""
    seconds = 0.0
    for first, last in reversed(others):
        if last <= begin:
            break  # as do all before it
        seconds += max(0.0, min(end, last) - max(begin, first))
    return seconds
