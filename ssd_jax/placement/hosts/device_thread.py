"""A thread that waits for devices in place of others, since they may hang for ever."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")
_Answer = queue.SimpleQueue[tuple[Any, Exception | None]]


class DeviceThread:
    """Makes calls one after the other; who waits for one is not held up by a lost host."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], _Answer]] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._waiting: set[_Answer] = set()
        self._failure: Exception | None = None
        threading.Thread(target=self._run_calls, daemon=True, name="devices").start()

    def run(self, make: Callable[[], T]) -> T:
        """Makes a call, and returns its result or raises its error, or that of `fail`."""
        answer: _Answer = queue.SimpleQueue()
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._waiting.add(answer)
        self._calls.put((make, answer))
        result, error = answer.get()
        with self._lock:
            self._waiting.discard(answer)
        if error is not None:
            raise error
        return result

    def fail(self, error: Exception) -> None:
        """Ends all waits, those of later calls too, by an error."""
        with self._lock:
            self._failure = error
            for answer in self._waiting:
                answer.put((None, error))

    def _run_calls(self) -> None:
        while True:
            make, answer = self._calls.get()
            try:
                answer.put((make(), None))
            except Exception as error:
                answer.put((None, error))
