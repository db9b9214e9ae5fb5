"""The engine's end of one gRPC stream: sends without waiting, keeps the answers that are asked."""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import grpc

from ssd_jax.runtime.activity import Activity, Busy
from ssd_jax.runtime.worker import codec
from ssd_jax.runtime.worker.clocks import ClockOffset
from ssd_jax.runtime.worker.messages import (
    Hello,
    Ping,
    ProtocolError,
    Refused,
    Round,
    Speculations,
    Stats,
    Welcome,
    Winner,
    Work,
)
from ssd_jax.runtime.worker.transport import LET_IN, METHOD, TOKEN, channel_options

_T = TypeVar("_T")
_KEPT = 1024  # spans of work that nobody has asked for


class Connection:
    """A stream to a worker. When it fails it stays failed: `alive` is then False.

    `heard` tells whether the worker has let it in, `ready` whether it agrees to the `Hello`, and
    `refused` whether it failed because the worker did not.

    Args:
      address: of the worker, as gRPC names it.
      hello: what the worker must be.
      token: secret that the worker was started with.
      counters: where ignored messages and broken streams are counted.
      clock: the engine's.
    """

    def __init__(
        self,
        address: str,
        hello: Hello,
        token: str,
        counters: Counter[str],
        *,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._hello, self._counters, self._clock = hello, counters, clock
        self._offset = ClockOffset()
        self._work: deque[tuple[Work, float, dict[int, int]]] = deque(maxlen=_KEPT)
        self._worked_until = 0.0  # on the worker's clock
        self._sent = self._received = 0  # bytes; each is changed by one thread only
        self._counted = 0
        self._changed = threading.Condition()
        self._asked = 0
        self._speculations: Speculations | None = None
        self._parts = 0  # answers to the last round; each tells of a forward more
        self._winner: Winner | None = None
        self._stats: Stats | None = None
        self.address = address
        self.alive, self.heard, self.ready, self.refused = True, False, False, False
        self.trouble = ""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=channel_options(hello))
        stream = self._channel.stream_stream(METHOD)
        self._call = stream(
            iter(self._outbox.get, None), metadata=((TOKEN, token),), wait_for_ready=False
        )
        self.send(hello)
        threading.Thread(target=self._receive, name="draft answers", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queues a message."""
        data = codec.encode(message)
        self._sent += len(data)
        self._outbox.put(data)

    def ping(self, number: int) -> None:
        """Asks for `Stats`."""
        with self._changed:
            self._offset.asked(number, self._clock())
        self.send(Ping(number=number))

    def keep_time(self, numbers: Iterator[int]) -> None:
        """Asks what the worker's clock shows, if it is time to."""
        while self._offset.due(self._clock()):
            self.ping(next(numbers))

    def activity(self, epochs: dict[int, int]) -> Activity:
        """What the worker has done, by our clock, since this was last called.

        Args:
          epochs: of the slots, to tell whose work it was.
        """
        with self._changed:
            work, total = list(self._work), self._sent + self._received
            self._work.clear()
            spans = [
                Busy(
                    span.what,
                    min(begin, received),
                    min(end, received),  # whatever the clocks say: it was told afterwards
                    [slot for slot, epoch in whose.items() if epochs.get(slot) == epoch],
                )
                for span, received, whose in work
                if (begin := self._offset.ours(span.begin)) is not None
                and (end := self._offset.ours(span.end)) is not None
            ]
        count, self._counted = total - self._counted, total
        return Activity(tuple(spans), count)

    def ask(self, message: Round) -> None:
        """Sends a round; answers to earlier ones are no longer kept."""
        with self._changed:
            self._asked, self._speculations, self._winner = message.number, None, None
            self._parts = 0
        self.send(message)

    @property
    def answered(self) -> bool:
        """Whether the worker has got as far as the last round that was sent."""
        return not self._asked or self._speculations is not None or self._winner is not None

    def speculations(self, forwards: int, timeout: float) -> tuple[Speculations | None, int]:
        """The answer to the last round after that many forwards, or the complete one.

        Returns: it, or after `timeout` seconds whatever has come; and how many forwards made it.
        """

        def enough() -> Speculations | None:
            found = self._speculations
            done = found is not None and (found.complete or self._parts >= forwards)
            return found if done else None

        self._wait(enough, timeout)
        with self._changed:
            return self._speculations, self._parts

    def winner(self, timeout: float) -> Winner | None:
        """The records that the last round asked for; None if they do not come in time."""
        return self._wait(lambda: self._winner, timeout)

    def stats(self, number: int, timeout: float) -> Stats | None:
        """The answer to the `Ping` of this number."""

        def fitting() -> Stats | None:
            return self._stats if self._stats and self._stats.number == number else None

        return self._wait(fitting, timeout)

    def wait_ready(self, timeout: float) -> bool:
        """Waits for the worker to agree to the `Hello`."""
        self._wait(lambda: self.ready or None, timeout)
        return self.ready

    def close(self) -> None:
        """Ends the stream."""
        self.alive = False
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()

    def _wait(self, found: Callable[[], _T | None], timeout: float) -> _T | None:
        with self._changed:
            self._changed.wait_for(lambda: found() is not None or not self.alive, timeout)
            return found()

    def _receive(self) -> None:
        trouble = "the worker ended the stream"
        try:
            self.heard = LET_IN in self._call.initial_metadata()  # waits for it
            for data in self._call:
                self._received += len(data)
                message = codec.decode(data)
                if isinstance(message, Refused):
                    self.refused = not self.ready
                    trouble = f"the worker refused: {message.reason}"
                    break
                with self._changed:
                    self._take(message)
                    self._changed.notify_all()
        except ProtocolError as error:
            self._counters["garbage"] += 1
            trouble = f"the worker sent {error}"
        except grpc.RpcError as error:
            self.refused = _code_of(error) == "UNIMPLEMENTED"
            trouble = f"the stream broke: {_code_of(error)}"
            if self.refused:
                trouble = "the worker refused: its token or its protocol is another"
        except Exception as error:  # whatever it is, nobody is to wait for answers from here
            self._counters["garbage"] += 1
            trouble = f"an answer of the worker could not be taken: {error!r}"
        finally:
            with self._changed:
                self.alive, self.trouble = False, trouble
                self._changed.notify_all()
            self._outbox.put(None)
            self._call.cancel()

    def _take(self, message: Any) -> None:
        match message:
            case Welcome():
                self.ready = True
            case Stats():
                message.check()
                self._stats = message
                self._offset.answered(message.number, message.clock, self._clock())
            case Speculations() | Winner():
                message.check(self._hello)
                self._take_work(message)
                if message.number < self._asked:
                    self._counters["overtaken"] += 1
                elif message.number > self._asked or self._replayed(message):
                    self._counters["ignored"] += 1
                elif isinstance(message, Winner):
                    self._winner = message
                else:
                    self._speculations = message
                    self._parts += 1
            case _:
                raise ProtocolError(f"a {type(message).__name__}, which is not for an engine")

    def _take_work(self, message: Speculations | Winner) -> None:
        """Keeps the work that an answer tells of; what was told before counts once."""
        whose = dict(zip(message.slots.tolist(), message.epochs.tolist(), strict=True))
        for span in message.work:
            if span.begin >= self._worked_until:
                self._work.append((span, self._clock(), whose))
                self._worked_until = span.end

    def _replayed(self, message: Speculations | Winner) -> bool:
        """Whether the same was said before: what has been used once must not change."""
        if isinstance(message, Winner):
            return self._winner is not None
        return self._speculations is not None and self._speculations.complete


def _code_of(error: grpc.RpcError) -> str:
    return f"{error.code().name}" if isinstance(error, grpc.Call) else repr(error)
