"""When a worker that owes an answer is taken to hang."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 30.0
"""Seconds."""


class HangLimit:
    """After `HANG` seconds; each time it is reached, it is twice as long.

    A worker that is only slow, with a long prompt perhaps, so gets to its end in spite of restarts.
    """

    def __init__(self, seconds: float = HANG, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds, self._clock = seconds, clock
        self._since = clock()

    def owed(self) -> None:
        """An answer is owed from now on."""
        self._since = self._clock()

    def reached(self) -> bool:
        """Whether the answer has been owed for too long."""
        if self._clock() - self._since < self._seconds:
            return False
        self._seconds *= 2
        return True
