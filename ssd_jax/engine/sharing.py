"""Engines that several threads call at once: whoever needs an event and finds no round under way
runs one, for all; the others wait for what it brings them.

Engines of one model share programs, a worker and what is observed, so that one round runs at a
time, of whichever engine. Events of a caller who does not ask for them are kept.
"""

from __future__ import annotations

import queue
import threading
from collections import deque
from collections.abc import Sequence

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, TokenEvent
from ssd_jax.errors import DeviceError, SsdError
from ssd_jax.system.interrupts import Deferred

_LONGEST = 10.0  # seconds that the end of a round is waited for


class Caller:
    """Someone's requests to one engine.

    Attributes:
      open: ids of those whose last event was not fetched.
      events: not fetched yet.
      wake: gets an item when it is worth to look again.
      closed: nothing comes any more: the model was closed, or the requests were cancelled.
      failed: whether an event that was fetched tells of an error.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: set[int] = set()
        self.events: deque[TokenEvent] = deque()
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.closed = self.failed = False

    def fetch(self) -> TokenEvent | None:
        """The next event, if there is one."""
        if not self.events:
            return None
        event = self.events.popleft()
        if event.output is not None:
            self.open.discard(event.request_id)
            self.failed |= event.output.finish_reason == "error"
        return event

    def check(self) -> None:
        """Raises: DeviceError: requests have failed, and so do those that follow."""
        if self.failed and self.engine.broken is not None:
            raise DeviceError(self.engine.broken)


class Sharing:
    """The callers of all engines of a model. Any thread may call; each `Caller` is one thread's."""

    def __init__(self) -> None:
        # Held for moments, never during a round, and in the main thread only within `Deferred`.
        self._lock = threading.Lock()
        self._round = threading.Lock()  # held during one
        self._callers: dict[tuple[Engine, int], Caller] = {}  # by request
        self._leader: Caller | None = None  # who runs a round, or is told to
        self._waiting: dict[Caller, None] = {}  # the longest first
        self._left: deque[Caller] = deque()  # requests to be cancelled
        self._closed = False

    def check(self) -> None:
        """Raises: SsdError: `close` was called."""
        if self._closed:
            raise SsdError("this model is closed; open it again")

    def add(self, caller: Caller, requests: Sequence[Request]) -> None:
        """Queues requests. Where it raises, those before may be queued: `leave` takes them back.

        Raises:
          InputError, DeviceError: see `Engine.add`.
          SsdError: the model is closed.
        """
        with Deferred():
            for request in requests:
                with self._lock:
                    self.check()
                    request_id = caller.engine.add(request)
                    caller.open.add(request_id)
                    self._callers[caller.engine, request_id] = caller

    def next(self, caller: Caller) -> TokenEvent:
        """Waits for an event of a caller with open requests.

        Raises:
          DeviceError: see `Engine.step`.
          SsdError: the model was closed.
        """
        try:
            while (event := self._turn(caller)) is None:
                pass
        except BaseException:
            with Deferred(), self._lock:
                self._waiting.pop(caller, None)
                if self._leader is caller:
                    self._hand_over()
            raise
        return event

    def leave(self, caller: Caller) -> None:
        """Cancels what is open. It may be called wherever Python deletes an object: it waits for
        nothing, and leaves to the next round what it cannot do now."""
        if not caller.open:
            return
        self._left.append(caller)
        with Deferred():
            if self._lock.acquire(blocking=False):
                try:
                    if self._leader is None:
                        self._sweep()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Ends the wait of all callers; returns when no round is under way."""
        with Deferred(), self._lock:
            self._closed = True
            for caller in self._callers.values():
                self._end(caller)
        if self._round.acquire(timeout=_LONGEST):
            self._round.release()

    def freeze(self) -> None:
        """Waits for the round under way and lets none follow. At its end Python unwinds whatever
        daemon threads do on devices, and C++ aborts the process for it."""
        self._round.acquire(timeout=_LONGEST)

    def _turn(self, caller: Caller) -> TokenEvent | None:
        """An event, or a round, or a wait."""
        with Deferred():
            with self._lock:
                event = caller.fetch()
                if event is not None:
                    return event
                if caller.closed:
                    raise SsdError("the model was closed while this request ran; open it again")
                self._leader = self._leader or caller
                leads = self._leader is caller
                if not leads:
                    self._waiting[caller] = None
            if leads:
                self._lead(caller)
                return None
        caller.wake.get()  # an interrupt comes through
        return None

    def _lead(self, caller: Caller) -> None:
        engine, events = caller.engine, []
        if not engine.has_work and engine.broken is None:
            raise SsdError("the engine was run by another, who has the events of this request")
        try:
            with self._round:
                events = engine.step()
        finally:
            with self._lock:
                for event in events:
                    self._deliver(engine, event)
                self._hand_over()

    def _deliver(self, engine: Engine, event: TokenEvent) -> None:
        caller = self._callers.get((engine, event.request_id))
        if caller is None:
            return
        caller.events.append(event)
        if event.output is not None:
            del self._callers[engine, event.request_id]
        if caller in self._waiting:
            del self._waiting[caller]
            caller.wake.put(None)

    def _hand_over(self) -> None:
        """After a round: whoever has waited longest runs the next one."""
        self._sweep()
        self._leader = next(iter(self._waiting), None)
        if self._leader is not None:
            del self._waiting[self._leader]
            self._leader.wake.put(None)

    def _sweep(self) -> None:
        """Cancels requests of those who have left; not while there is a leader, for it may have
        begun."""
        while self._left:
            caller = self._left.popleft()
            for request_id in caller.open:
                self._callers.pop((caller.engine, request_id), None)
                caller.engine.cancel(request_id, silent=True)
            self._waiting.pop(caller, None)
            self._end(caller)

    def _end(self, caller: Caller) -> None:
        caller.closed = True
        caller.wake.put(None)
