"""One thread runs the rounds of a model; callers hand requests in and take events out.

Engines of one model share programs, a worker and what is observed, so only one round runs at a
time, of engines in turn. The thread starts with the first request, sleeps while there is none, and
ends when the model is closed or deleted, or the process ends.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence

from typing_extensions import override

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, TokenEvent
from ssd_jax.errors import DeviceError, SsdError
from ssd_jax.system.interrupts import Deferred

WHOLE_TEXT_INTERVAL = 0.05
"""Seconds that events wait for others where only whole texts are wanted."""
_LONGEST = 10.0  # seconds to wait for the end of a round
_CLOSED = "this model is closed; open it again"
_CLOSED_MEANWHILE = "the model was closed while this request ran; open it again"


class Caller(ABC):
    """One caller's requests to one engine. It belongs to one thread, or to one task.

    Attributes:
      open: ids of requests whose last event was not fetched.
      failed: whether a fetched event reports an error.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: set[int] = set()
        self.failed = False

    @abstractmethod
    def put(self, item: TokenEvent | BaseException) -> None:
        """Hands it an event, or an error, from the thread of the rounds; does not wait."""

    def take(self, item: TokenEvent | BaseException) -> TokenEvent:
        """The event; raises what is an error."""
        if isinstance(item, BaseException):
            raise item
        if item.output is not None:
            self.open.discard(item.request_id)
            self.failed |= item.output.finish_reason == "error"
        return item

    def check(self) -> None:
        """Raises: DeviceError: requests have failed, and all further ones would fail."""
        if self.failed and self.engine.broken is not None:
            raise DeviceError(self.engine.broken)


class ThreadCaller(Caller):
    """A caller that waits in its thread."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self._items: queue.SimpleQueue[TokenEvent | BaseException] = queue.SimpleQueue()

    @override
    def put(self, item: TokenEvent | BaseException) -> None:
        self._items.put(item)

    def next(self) -> TokenEvent:
        """Waits for an event; interrupts are raised at once.

        Raises:
          SsdError: the model was closed. Also what a round has raised.
        """
        return self.take(self._items.get())

    def poll(self, seconds: float) -> TokenEvent | None:
        """`next`; None if no event comes within these seconds."""
        try:
            return self.take(self._items.get(timeout=seconds))
        except queue.Empty:
            return None


class TaskCaller(Caller):
    """A caller that waits in a task of the running event loop.

    Args:
      interval: seconds that events may wait for others, so that the loop, which takes time from the
        rounds, wakes once for all; a request's first event and its last never wait.
    """

    def __init__(self, engine: Engine, interval: float = 0.0) -> None:
        super().__init__(engine)
        self._loop = asyncio.get_running_loop()
        self._items: deque[TokenEvent | BaseException] = deque()
        self._came = asyncio.Event()
        self._interval, self._due = interval, 0.0

    @override
    def put(self, item: TokenEvent | BaseException) -> None:
        self._items.append(item)
        now = time.monotonic()
        if now >= self._due or isinstance(item, BaseException) or item.output is not None:
            self._due = now + self._interval
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(self._came.set)

    async def next(self) -> TokenEvent:
        """Waits for an event, without a thread; raises what `ThreadCaller.next` does."""
        while not self._items:
            self._came.clear()
            await self._came.wait()
        return self.take(self._items.popleft())


class RoundThread:
    """Runs the rounds of all engines of a model, for all their callers. Any thread may call it."""

    def __init__(self) -> None:
        # Held for moments, never during a round, and in the main thread only within `Deferred`.
        self._changed = threading.Condition()
        self._callers: dict[Engine, dict[int, Caller]] = {}  # by request; the next engine first
        self._departed: deque[Caller] = deque()  # their requests are to be cancelled
        self._stopped: deque[tuple[Caller, int]] = deque()  # requests to be ended
        self._thread: threading.Thread | None = None
        self._closed = False
        self._process = os.getpid()

    def check(self) -> None:
        """Raises: SsdError: `close` was called, or this process is a fork, without the threads."""
        if os.getpid() != self._process:
            raise SsdError(
                f"this model was opened in process {self._process}, and JAX does not work in a "
                "fork of it; open the model in a process that was spawned: "
                'multiprocessing.get_context("spawn")'
            )
        if self._closed:
            raise SsdError(_CLOSED)

    def add(self, caller: Caller, requests: Sequence[Request]) -> None:
        """Queues requests; if it raises, earlier ones may be queued: `leave` cancels them.

        Raises:
          InputError, DeviceError: see `Engine.add`.
          SsdError: the model is closed.
        """
        with Deferred():
            for request in requests:
                with self._changed:
                    self.check()
                    request_id = caller.engine.add(request)
                    caller.open.add(request_id)
                    self._callers.setdefault(caller.engine, {})[request_id] = caller
                    if self._thread is None:
                        self._thread = threading.Thread(
                            target=self._run, name="ssd_jax rounds", daemon=True
                        )
                        self._thread.start()
                    self._changed.notify_all()

    def stop(self, caller: Caller) -> None:
        """Ends the caller's open requests after the round under way; their last events come."""
        self._stopped.extend((caller, request_id) for request_id in sorted(caller.open))

    def leave(self, caller: Caller) -> None:
        """Cancels the caller's open requests, whose events are not fetched any more.

        It may be called wherever Python deletes an object: it never waits.
        """
        if caller.open:
            self._departed.append(caller)

    def close(self) -> None:
        """Ends the waits of all callers; returns when no round is under way, after ten seconds
        at the latest."""
        with Deferred(), self._changed:
            self._closed = True
            for callers in self._callers.values():
                for caller in callers.values():
                    caller.put(SsdError(_CLOSED_MEANWHILE))
            for requests in (self._callers, self._departed, self._stopped):
                requests.clear()
        self.freeze()

    def freeze(self) -> None:
        """Waits for the round under way and lets none follow.

        At exit Python unwinds daemon threads even while they use devices, and C++ then aborts the
        process.
        """
        with Deferred(), self._changed:
            self._closed = True
            self._changed.notify_all()
            thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            thread.join(_LONGEST)

    def _run(self) -> None:
        while (engine := self._next_engine()) is not None:
            try:
                if not engine.has_work and engine.broken is None:
                    raise SsdError(
                        "the engine was run by another, who has the events of this request"
                    )
                events = engine.step()
            except BaseException as error:
                self._fail(engine, error)
            else:
                self._deliver(engine, events)

    def _next_engine(self) -> Engine | None:
        """Waits for an engine with requests, whose turn it is; None once the model is closed."""
        with self._changed:
            while not self._closed:
                self._sweep()
                if self._callers:
                    engine = next(iter(self._callers))
                    self._callers[engine] = self._callers.pop(engine)
                    return engine
                self._changed.wait()
            return None

    def _deliver(self, engine: Engine, events: Sequence[TokenEvent]) -> None:
        with self._changed:
            callers = self._callers.get(engine, {})
            for event in events:
                caller = callers.get(event.request_id)
                if caller is None:
                    continue
                if event.output is not None:
                    self._forget(engine, event.request_id)
                caller.put(event)

    def _fail(self, engine: Engine, error: BaseException) -> None:
        """Tells the caller of the oldest request what a round has raised; the others go on."""
        with self._changed:
            callers = self._callers.get(engine)
            if not callers:
                return
            caller = callers[min(callers)]
            self._withdraw(caller)
            caller.put(error)

    def _sweep(self) -> None:
        """Ends and cancels what callers have asked to, between rounds."""
        while self._stopped:
            caller, request_id = self._stopped.popleft()
            caller.engine.cancel(request_id)
        while self._departed:
            self._withdraw(self._departed.popleft())

    def _withdraw(self, caller: Caller) -> None:
        callers = self._callers.get(caller.engine, {})
        ids = [request_id for request_id, other in callers.items() if other is caller]
        for request_id in sorted(ids):  # each is then the first that waits
            caller.engine.cancel(request_id, silent=True)
            self._forget(caller.engine, request_id)

    def _forget(self, engine: Engine, request_id: int) -> None:
        callers = self._callers[engine]
        del callers[request_id]
        if not callers:
            del self._callers[engine]
