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

_MAX_SPANS = 64  # spans of the target; draft work reported later than that counts as not hidden


class Busy(NamedTuple):
    """A piece of a draft's work.

    Attributes:
      kind: "prefill", "draft" (just in time), "promote" (a winner's keys and values, its q read),
        or one of `FORWARDS`; each ends with a wait for the device.
      begin, end: seconds.
      slots: slots that the work was for.
      worker: number of the draft that did it, where several share the work.
    """

    kind: str
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
      bytes: of all slots, as `Activity.bytes`.
      round_trip: as `Activity.round_trip`.
    """

    busy: float
    hidden: float
    steps: tuple[float, ...]
    bytes: int
    round_trip: float | None = None


class TargetTimes:
    """Recent spans in which the target was busy."""

    def __init__(self) -> None:
        self._spans: deque[tuple[float, float]] = deque(maxlen=_MAX_SPANS)
        self._busy_since: float | None = None

    def idle(self) -> None:
        """Marks that no dispatched program will be read."""
        self._busy_since = None

    def dispatched(self, now: float) -> None:
        """Marks that a program was dispatched."""
        if self._busy_since is None:
            self._busy_since = now

    def read(self, now: float, *, in_flight: bool) -> tuple[float, float]:
        """Marks that an outcome was read; `in_flight` says whether another one is.

        Returns: when the target was busy with it: (begin, end).
        """
        begin = now if self._busy_since is None else self._busy_since
        self._busy_since = now if in_flight else None
        self._spans.append((begin, now))
        return begin, now

    def hidden(self, spans: Collection[Busy]) -> float:
        """Seconds of a draft's work during which the target was busy."""
        return sum(overlap(span.begin, span.end, self._spans) for span in spans)

    def cost(self, slot: int, activity: Activity) -> DraftCost:
        """The cost of the draft's work for a slot."""
        spans = [span for span in activity.spans if slot in span.slots]
        return DraftCost(
            busy=sum(span.end - span.begin for span in spans),
            hidden=self.hidden(spans),
            steps=tuple(span.end - span.begin for span in spans if span.kind in FORWARDS),
            bytes=activity.bytes,
            round_trip=activity.round_trip,
        )


def overlap(begin: float, end: float, spans: Reversible[tuple[float, float]]) -> float:
    """Seconds of one span that lie within others, which are in order and do not overlap."""
    seconds = 0.0
    for span_begin, span_end in reversed(spans):
        if span_end <= begin:
            break  # as do all before it
        seconds += max(0.0, min(end, span_end) - max(begin, span_begin))
    return seconds
