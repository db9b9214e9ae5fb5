"""Lets several threads and event loops call engines at once.

A thread that needs an event and finds no round under way runs one, for all callers; the other
threads wait for their events. Rounds that tasks of event loops need run in a thread of their own.
Engines of one model share programs, a worker and what is observed, so only one round runs at a
time, of any engine. Events that a caller does not ask for are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.request import Request, TokenEvent
from ssd_jax.errors import DeviceError, SsdError
from ssd_jax.system.interrupts import Deferred

_LONGEST = 10.0  # seconds to wait for the end of a round


class Caller:
    """One caller's requests to one engine.

    Attributes:
      open: ids of requests whose last event was not fetched.
      events: events not fetched yet.
      wake: gets an item when the caller should look again.
      task: the event loop of a task that waits, and what is set there when it should look again.
      error: what a round that was run for such a task raised.
      closed: no more events come: the model was closed, or the requests were cancelled.
      failed: whether a fetched event reports an error.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.open: set[int] = set()
        self.events: deque[TokenEvent] = deque()
        self.wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.task: tuple[asyncio.AbstractEventLoop, asyncio.Event] | None = None
        self.error: BaseException | None = None
        self.closed = self.failed = False

    def tell(self) -> None:
        """Lets it look again."""
        if self.task is None:
            self.wake.put(None)
        else:
            loop, woken = self.task
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(woken.set)

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
        """Raises: DeviceError: requests have failed, and all further ones would fail."""
        if self.failed and self.engine.broken is not None:
            raise DeviceError(self.engine.broken)


class Sharing:
    """The callers of all engines of a model.

    Any thread may call; each `Caller` belongs to one thread, or to one task of an event loop.
    """

    def __init__(self) -> None:
        # Held for moments, never during a round, and in the main thread only within `Deferred`.
        self._lock = threading.Lock()
        self._round = threading.Lock()  # held during one
        self._callers: dict[tuple[Engine, int], Caller] = {}  # by request
        self._leader: Caller | None = None  # runs a round, or was told to
        self._waiting: dict[Caller, None] = {}  # longest wait first
        self._rounds = ThreadPoolExecutor(1, "ssd_jax rounds")  # that no thread of a caller runs
        self._departed: deque[Caller] = deque()  # their requests are to be cancelled
        self._closed = self._frozen = False
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
            raise SsdError("this model is closed; open it again")

    def add(self, caller: Caller, requests: Sequence[Request]) -> None:
        """Queues requests; if it raises, earlier ones may be queued: `leave` cancels them.

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

    async def next_async(self, caller: Caller) -> TokenEvent:
        """`next` for a task of an event loop; waiting takes no thread, and a task that is cancelled
        is to `leave`."""
        woken = asyncio.Event()
        caller.task = asyncio.get_running_loop(), woken
        while True:
            woken.clear()
            with Deferred(), self._lock:
                event = self._fetch(caller)
                if event is not None:
                    return event
                self._waiting[caller] = None
                if self._leader is None:
                    self._hand_over()
            await woken.wait()

    def leave(self, caller: Caller) -> None:
        """Cancels the caller's open requests.

        It may be called wherever Python deletes an object: it never waits, and leaves to the next
        round what it cannot do now.
        """
        if not caller.open:
            return
        self._departed.append(caller)
        with Deferred():
            if self._lock.acquire(blocking=False):
                try:
                    if self._leader is None:
                        self._sweep()
                finally:
                    self._lock.release()

    def close(self) -> None:
        """Ends the waits of all callers; returns when no round is under way, after ten seconds
        at the latest.
        """
        with Deferred(), self._lock:
            self._closed = True
            for caller in self._callers.values():
                self._end(caller)
            self._callers.clear()
            self._waiting.clear()
        if not self._frozen and self._round.acquire(timeout=_LONGEST):
            self._round.release()

    def freeze(self) -> None:
        """Waits for the round under way and lets none follow.

        At exit Python unwinds daemon threads even while they use devices, and C++ then aborts the
        process.
        """
        self._round.acquire(timeout=_LONGEST)
        self._closed = self._frozen = True

    def _turn(self, caller: Caller) -> TokenEvent | None:
        """Returns an event if there is one; else runs a round or waits."""
        with Deferred():
            with self._lock:
                event = self._fetch(caller)
                if event is not None:
                    return event
                self._leader = self._leader or caller
                leads = self._leader is caller
                if not leads:
                    self._waiting[caller] = None
            if leads:
                self._lead(caller)
                return None
        caller.wake.get()  # interruptible
        return None

    def _fetch(self, caller: Caller) -> TokenEvent | None:
        """The caller's next event; None if it must wait."""
        event = caller.fetch()
        if event is None and caller.error is not None:
            error, caller.error = caller.error, None
            raise error
        if event is None and caller.closed:
            raise SsdError("the model was closed while this request ran; open it again")
        return event

    def _lead_for(self, caller: Caller) -> None:
        """Runs a round for a task, which is told of errors."""
        try:
            self._lead(caller)
        except BaseException as error:
            with self._lock:
                caller.error = error
                self._waiting.pop(caller, None)
                caller.tell()

    def _lead(self, caller: Caller) -> None:
        engine, events = caller.engine, []
        try:
            if not engine.has_work and engine.broken is None:
                raise SsdError("the engine was run by another, who has the events of this request")
            with self._round:
                if not self._closed:  # since this caller was told to lead
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
            caller.tell()

    def _hand_over(self) -> None:
        """After a round, lets the next one be run for the caller that has waited longest."""
        self._sweep()
        self._leader = None
        caller = next(iter(self._waiting), None)
        if caller is None:
            return
        del self._waiting[caller]
        if caller.task is None:
            caller.tell()
        else:
            self._rounds.submit(self._lead_for, caller)
            self._waiting[caller] = None
        self._leader = caller

    def _sweep(self) -> None:
        """Cancels the requests of callers that have left.

        Not called while a leader may be running a round.
        """
        while self._departed:
            caller = self._departed.popleft()
            for request_id in sorted(caller.open):  # each is then the first that waits
                self._callers.pop((caller.engine, request_id), None)
                caller.engine.cancel(request_id, silent=True)
            self._waiting.pop(caller, None)
            self._end(caller)

    def _end(self, caller: Caller) -> None:
        caller.closed = True
        caller.tell()
