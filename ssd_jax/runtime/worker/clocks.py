"""A worker's clock in terms of the engine's, from questions and answers (Cristian's algorithm)."""

from __future__ import annotations

from typing import NamedTuple

EVERY = 5.0
"""Seconds between questions."""
_AT_FIRST = 4  # questions at once: the first answer may wait for the transport to warm up
_DRIFT = 1e-4  # seconds a second that two clocks may drift apart; crystals are within half of it


class _Sample(NamedTuple):
    offset: float  # of the worker's clock against ours
    error: float  # at most, when it was taken
    taken: float


class ClockOffset:
    """How far a worker's monotonic clock is ahead of ours.

    An answer that says what the worker's clock shows was written between question and answer, so
    half the time between them is the error. The least error counts, older ones grown by drift.
    """

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._last = -float("inf")
        self._questions = 0
        self._best: _Sample | None = None

    def due(self, now: float) -> bool:
        """Whether it is time for another question; a worker that is silent is not asked again."""
        early = self._questions < _AT_FIRST
        return early or (not self._asked and now - self._last >= EVERY)

    def asked(self, number: int, now: float) -> None:
        """A question was sent."""
        self._asked[number] = self._last = now
        self._questions += 1

    def answered(self, number: int, theirs: float, now: float) -> None:
        """An answer has come; one that was not asked for is ignored."""
        sent = self._asked.pop(number, None)
        if sent is None:
            return
        sample = _Sample(theirs - (sent + now) / 2, (now - sent) / 2, now)
        if self._best is None or sample.error <= self.error(now):
            self._best = sample

    def error(self, now: float) -> float:
        """Seconds by which a time from `ours` may be wrong; infinite before the first answer."""
        best = self._best
        return float("inf") if best is None else best.error + _DRIFT * (now - best.taken)

    def ours(self, theirs: float) -> float | None:
        """Our time when the worker's clock showed `theirs`; None before the first answer."""
        return None if self._best is None else theirs - self._best.offset
