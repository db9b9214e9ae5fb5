"""The order in which requests enter slots."""

from __future__ import annotations

import bisect
import contextlib
import threading
from collections.abc import Iterator

from ssd_jax.engine.requests.state import RequestState

MOST_OVERTAKEN = 64
"""Requests that may enter slots before one that came earlier; then it is the first in the queue."""


def rank(state: RequestState) -> tuple[int, int, int]:
    """Sorts requests: a lower `Request.priority` first, of the same priority the older.

    A request that was overtaken often enough comes before all others, so none waits for ever.
    """
    if state.overtaken >= MOST_OVERTAKEN:
        return 0, 0, state.request_id
    return 1, state.request.priority, state.request_id


class WaitingQueue:
    """Requests without a slot, in the order of `rank`. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()  # held for moments
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        with self._lock:
            return iter([*self._states])

    @property
    def first(self) -> RequestState | None:
        """The request that is the next to enter a slot; None without any."""
        with self._lock:
            return self._states[0] if self._states else None

    def add(self, state: RequestState) -> None:
        """Puts a request in its place: a new one, or one that was preempted."""
        with self._lock:
            bisect.insort(self._states, state, key=rank)

    def remove(self, state: RequestState) -> None:
        """Removes a request, if it is there."""
        with self._lock, contextlib.suppress(ValueError):
            self._states.remove(state)

    def enter(self, state: RequestState) -> None:
        """Removes a request that enters a slot, and counts by whom the others are overtaken."""
        self.remove(state)
        with self._lock:
            ends = [*self._states[:1], *self._states[-1:]]
            if all(rank(other)[:2] == rank(state)[:2] for other in ends):
                return  # all have one priority
            for other in self._states:
                other.overtaken += other.request_id < state.request_id
            self._states.sort(key=rank)
