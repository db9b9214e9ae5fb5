"""Ending early but cleanly: a time limit, SIGTERM, Ctrl-C."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Iterator

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """Whether to stop at the next step.

    Attributes:
      why: in words, once it is asked for.
    """

    def __init__(self, max_seconds: float) -> None:
        self._deadline = time.monotonic() + max_seconds if max_seconds else float("inf")
        self._limit = max_seconds
        self.why = ""

    def ask(self, why: str) -> None:
        """Asks to stop at the next step."""
        self.why = self.why or why

    def asked(self) -> bool:
        """Whether something has asked to stop, or time is up."""
        if time.monotonic() >= self._deadline:
            self.ask(f"max_seconds = {self._limit:g} are over")
        return bool(self.why)


@contextlib.contextmanager
def stop_signals(stop: Stop) -> Iterator[None]:
    """SIGTERM and Ctrl-C ask to stop; the second one acts as it does elsewhere.

    Does nothing outside the main thread, where signals cannot be taken.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in _SIGNALS}

    def take(number: int, _frame: object) -> None:
        stop.ask(signal.Signals(number).name)
        signal.signal(number, before[signal.Signals(number)])

    for number in _SIGNALS:
        signal.signal(number, take)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
