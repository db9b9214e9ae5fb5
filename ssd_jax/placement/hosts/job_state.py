"""What all processes of a job have in common: the calls so far, and whether the job goes on."""

from __future__ import annotations

import threading
import zlib

from ssd_jax.errors import SsdError


class CallLog:
    """The calls of a process so far, by which processes notice that theirs differ.

    Attributes:
      count: number of calls.
      digest: checksum of their frames.
    """

    def __init__(self) -> None:
        self.count = self.digest = 0

    def add(self, frame: bytes) -> None:
        """Adds the call of a frame."""
        self.count, self.digest = self.count + 1, zlib.crc32(frame, self.digest)


class JobState:
    """Whether a job goes on. It ends once: it is closed, or it fails.

    Attributes:
      failure: why it has failed; None if it has not.
      reported: set once all processes that take messages have the failure.
    """

    def __init__(self) -> None:
        self.failure: SsdError | None = None
        self.reported = threading.Event()
        self._closed, self._lock = False, threading.Lock()

    def close(self) -> bool:
        """Closes the job; returns whether it was going on."""
        with self._lock:
            goes_on = not self._closed and self.failure is None
            self._closed |= goes_on
            return goes_on

    def fail(self, failure: SsdError) -> bool:
        """Ends the job by a failure; returns whether it was going on."""
        with self._lock:
            goes_on = not self._closed and self.failure is None
            if goes_on:
                self.failure = failure
            return goes_on
