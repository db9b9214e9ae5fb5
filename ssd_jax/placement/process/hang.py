"""When a worker that owes something is taken to hang."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 30.0
"""Seconds for an answer."""
SILENCE = 1.5
"""Seconds for a sign of life: a worker accepts streams while it computes, too."""
_STEP = 1.0  # seconds


class HangLimit:
    """After some seconds; each time it is reached, it is twice as long.

    A worker that is only slow, with a long prompt perhaps, so gets to its end in spite of restarts.
    Time counts while somebody looks, at most a second between two looks: a worker has had no chance
    to be heard while its engine was idle, or the whole host asleep.

    Args:
      seconds: the first limit.
      forgets: the limit is the first one again where it was kept with ease.
    """

    def __init__(
        self,
        seconds: float = HANG,
        *,
        forgets: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first = self._seconds = seconds
        self._forgets, self._clock = forgets, clock
        self._by: str | None = None
        self._waited = self._looked = 0.0

    def owed(self, by: str) -> None:
        """The worker at this address owes something, from now on if it did not before."""
        if self._by != by:
            self._by, self._waited, self._looked = by, 0.0, self._clock()

    def settled(self) -> None:
        """Nothing is owed."""
        if self._by is not None and self._forgets and self._waited < self._first:
            self._seconds = self._first
        self._by = None

    def reached(self) -> bool:
        """Whether something has been owed for too long; nothing is owed then."""
        if self._by is None:
            return False
        now = self._clock()
        self._waited += min(now - self._looked, _STEP)
        self._looked = now
        if self._waited < self._seconds:
            return False
        self._seconds *= 2
        self._by = None
        return True
