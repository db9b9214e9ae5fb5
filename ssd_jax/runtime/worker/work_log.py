"""What a worker was busy with, until an answer takes it along."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ssd_jax.runtime.worker.messages import MAX_WORK, Work


class WorkLog:
    """Spans of work, one after the other; the oldest are forgotten where nobody takes them.

    Args:
      clock: seconds, monotonic.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._since = 0.0
        self._spans: deque[Work] = deque(maxlen=MAX_WORK)

    def begin(self) -> None:
        """Work begins after a pause."""
        self._since = self._clock()

    def end(self, what: str) -> None:
        """What was dispatched so far is there; what follows it on the device begins now."""
        now = self._clock()
        self._spans.append(Work(what=what, begin=self._since, end=now))
        self._since = now

    def take(self) -> tuple[Work, ...]:
        """All that was not taken yet."""
        taken = tuple(self._spans)
        self._spans.clear()
        return taken
