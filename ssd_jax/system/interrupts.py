"""Deferred interrupts: Ctrl-C amid a change of what threads share would leave it half done."""

from __future__ import annotations

# `signal` wraps these functions in look-ups of enums, which take 13 us a call.
import _signal  # pyright: ignore[reportMissingImports]
import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
"""Signals that may raise in running code: Ctrl-C, a request to end, a time limit."""
PATIENCE = 2.0
"""Seconds that a repeated interrupt waits: a change is shorter, unless something hangs."""
_INSISTENT_COUNT = 3  # times


class Deferred:
    """A context in which signals with Python handlers are noted; the handlers run when it is left.

    A third or later Ctrl-C, more than `PATIENCE` after the first, is handled at once. Outside the
    main thread, where no handler runs, and within another `Deferred` it does nothing.

    Args:
      numbers: the signals; all of `SIGNALS` if none is given.
      clock: seconds, monotonic.
    """

    def __init__(
        self, *numbers: signal.Signals, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._numbers, self._clock = numbers or SIGNALS, clock
        self._handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self._pending: dict[int, FrameType | None] = {}
        self._count, self._first = 0, 0.0
        self._run_at_once = False  # signals to their handlers, at once

    def __enter__(self) -> Deferred:
        """Returns: this object, or the one that it is within."""
        active = self
        if threading.current_thread() is not threading.main_thread():
            return active
        try:
            for number in self._numbers:
                handler = _signal.getsignal(number)
                if isinstance(handler, Deferred) and not handler._run_at_once:
                    active = handler
                elif callable(handler):
                    self._handlers[number] = handler
                    _signal.signal(number, self)
        except BaseException:  # from a signal that is not deferred yet
            self._restore()
            raise
        return active

    def __exit__(self, *_exception: object) -> None:
        try:
            self._restore()
        finally:
            self._deliver()

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Handles a signal within the context."""
        if self._run_at_once:
            self._handlers[number](number, frame)
            return
        now = self._clock()
        if not self._count:
            self._first = now
        self._count += 1
        self._pending[number] = frame
        if self._count >= _INSISTENT_COUNT and now > self._first + PATIENCE:
            self._deliver()

    @property
    def pending(self) -> bool:
        """Whether a signal waits."""
        return bool(self._pending)

    def clear(self) -> None:
        """Drops the noted signals, which have been handled."""
        self._pending.clear()
        self._count = 0

    @contextlib.contextmanager
    def immediate(self) -> Iterator[None]:
        """A context in which handlers run at once, for a wait that an interrupt may end."""
        self._run_at_once = True
        try:
            yield
        finally:
            self._run_at_once = False

    def _restore(self) -> None:
        try:
            for number, handler in self._handlers.items():
                if _signal.getsignal(number) is self:
                    _signal.signal(number, handler)
        finally:
            self._run_at_once = True  # where one that was put back has kept others from it

    def _deliver(self) -> None:
        while self._pending:
            number, frame = self._pending.popitem()
            try:
                self._handlers[number](number, frame)
            finally:
                self._deliver()
