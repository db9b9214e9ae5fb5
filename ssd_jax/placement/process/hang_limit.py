"""When a worker that owes an answer counts as hanging."""

from __future__ import annotations

import time
from collections.abc import Callable

HANG = 30.0
"""Seconds that an answer may take."""
SILENCE = 1.5
"""Seconds that a sign of life may take: a worker accepts streams even while it computes."""
_STEP = 1.0  # seconds


class HangLimit:
    """A time limit in seconds that doubles each time it is reached.

    So a worker that is only slow, perhaps with a long prompt, finishes in spite of restarts. Time
    counts only while it is checked, at most a second between two checks: a worker cannot be heard
    while its engine is idle or the whole host is asleep.

    Args:
      seconds: the first limit.
      forgets: whether the limit returns to the first one after a wait shorter than that.
    """

    def __init__(
        self,
        seconds: float = HANG,
        *,
        forgets: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_limit = self._limit = seconds
        self._forgets, self._clock = forgets, clock
        self._debtor: str | None = None
        self._waited = self._last_check = 0.0

    def clear(self) -> None:
        """Records that nothing is owed."""
        if self._debtor is not None and self._forgets and self._waited < self._first_limit:
            self._limit = self._first_limit
        self._debtor = None

    def reached(self, debtor: str) -> bool:
        """Whether the worker at address `debtor`, which owes something, has owed it for too long.

        Time counts from the first check since `clear`, or since a check of another worker. If the
        limit is reached, nothing is owed any more.
        """
        now = self._clock()
        if self._debtor != debtor:
            self._debtor, self._waited, self._last_check = debtor, 0.0, now
        self._waited += min(now - self._last_check, _STEP)
        self._last_check = now
        if self._waited < self._limit:
            return False
        self._limit *= 2
        self._debtor = None
        return True
