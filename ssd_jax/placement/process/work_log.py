"""What a worker reports of its work, in this host's time, and what its messages take."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from ssd_jax.roles.activity import Activity, Busy
from ssd_jax.wire.messages import RoundAnswer

_MAX_SPANS = 1024  # until they are asked for
_RECENT = 64  # answers


class WorkLog:
    """Work that a worker has reported, and bytes that were sent and received.

    Args:
      shares_clock: as of `WorkerClock`.

    Attributes:
      clock: the worker's.
    """

    def __init__(self, *, shares_clock: bool) -> None:
        self.clock = WorkerClock(shared=shares_clock)
        self._lock = threading.Lock()
        self._spans: deque[tuple[Busy, RoundAnswer]] = deque(maxlen=_MAX_SPANS)
        self._last_end = 0.0  # of the reported spans, on the worker's clock
        self._bytes = 0

    def add_bytes(self, count: int) -> None:
        """Counts bytes of a message."""
        with self._lock:
            self._bytes += count

    def add(self, answer: RoundAnswer) -> None:
        """Adds the work that an answer reports; repeated reports count once."""
        now = time.perf_counter()  # work ended before it was reported, whatever it says
        offset = self.clock.record_answer(answer, now)
        with self._lock:
            for work in answer.work:
                if work.begin >= self._last_end:
                    begin, end = min(work.begin + offset, now), min(work.end + offset, now)
                    self._spans.append((Busy(work.kind, begin, end), answer))
                    self._last_end = work.end

    def take(self, epochs: np.ndarray) -> Activity:
        """What was added since the last call, for the requests of these `epochs` [B]."""
        with self._lock:
            spans, count = list(self._spans), self._bytes
            self._spans.clear()
            self._bytes = 0
        return Activity(
            tuple(
                span._replace(slots=answer.slots[epochs[answer.slots] == answer.epochs].tolist())
                for span, answer in spans
            ),
            count,
            self.clock.round_trip,
        )


class WorkerClock:
    """A worker's clock, and how long messages take.

    Args:
      shared: whether the clock may be this host's, until an answer contradicts it: at the end of a
        tunnel is another host. If not, its times are converted to those at which an answer sent
        then would have arrived, judging by the fastest recent one. They thus include the way here,
        which waiting for the next answer includes, too.
    """

    def __init__(self, *, shared: bool) -> None:
        self._is_shared = shared
        self._request_times: dict[
            int, float
        ] = {}  # when messages of this round were sent, by number
        self._offsets: deque[float] = deque(maxlen=_RECENT)
        self._trips: deque[float] = deque(maxlen=_RECENT)

    def record_request(self, number: int, *, first: bool = False) -> None:
        """Records that a message is sent now (`first`: of a round)."""
        self._request_times = {} if first else dict(self._request_times)
        self._request_times[number] = time.perf_counter()

    def record_answer(self, message: RoundAnswer, now: float) -> float:
        """Records an answer. Returns what to add to its times."""
        self._offsets.append(now - message.sent)
        request_time = self._request_times.get(message.number)
        self._is_shared &= message.sent <= now and (
            request_time is None or message.received >= request_time
        )
        if request_time is not None:
            self._trips.append(max(now - request_time - (message.sent - message.received), 0.0))
        return 0.0 if self._is_shared else min(self._offsets)

    @property
    def round_trip(self) -> float | None:
        """Round-trip seconds of the fastest recent answer."""
        return min(self._trips, default=None)
