"""The engine's end of one gRPC stream: sends without waiting, keeps the answers that are asked."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, TypeVar

import grpc

from ssd_jax.runtime.worker import codec
from ssd_jax.runtime.worker.messages import (
    Hello,
    ProtocolError,
    Refused,
    Round,
    Speculations,
    Stats,
    Welcome,
    Winner,
)
from ssd_jax.runtime.worker.transport import METHOD, options

_T = TypeVar("_T")


class Connection:
    """A stream to a worker. When it fails it stays failed: `alive` is then False.

    `refused` tells whether that was because the worker did not agree to the `Hello`.

    Args:
      address: host:port.
      hello: what the worker must be.
      counters: where ignored messages and broken streams are counted.
    """

    def __init__(self, address: str, hello: Hello, counters: Counter[str]) -> None:
        self._hello, self._counters = hello, counters
        self._changed = threading.Condition()
        self._asked = 0
        self._speculations: Speculations | None = None
        self._winner: Winner | None = None
        self._stats: Stats | None = None
        self.address = address
        self.alive, self.ready, self.refused = True, False, False
        self.trouble = ""
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(address, options=options(hello))
        stream = self._channel.stream_stream(METHOD)
        self._call = stream(iter(self._outbox.get, None), wait_for_ready=False)
        self.send(hello)
        threading.Thread(target=self._receive, name="draft answers", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queues a message."""
        self._outbox.put(codec.encode(message))

    def ask(self, message: Round) -> None:
        """Sends a round; answers to earlier ones are no longer kept."""
        with self._changed:
            self._asked, self._speculations, self._winner = message.number, None, None
        self.send(message)

    @property
    def answered(self) -> bool:
        """Whether the worker has got as far as the last round that was sent."""
        return not self._asked or self._speculations is not None or self._winner is not None

    def speculations(self, timeout: float) -> Speculations | None:
        """The complete answer to the last round; after `timeout` seconds whatever has come."""

        def complete() -> Speculations | None:
            found = self._speculations
            return found if found is not None and found.complete else None

        return self._wait(complete, timeout) or self._speculations

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
            for data in self._call:
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
            trouble = f"the stream broke: {_code_of(error)}"
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
                self._stats = message
            case Speculations() | Winner():
                message.check(self._hello)
                if message.number != self._asked or self._replayed(message):
                    self._counters["ignored"] += 1
                elif isinstance(message, Winner):
                    self._winner = message
                else:
                    self._speculations = message
            case _:
                raise ProtocolError(f"a {type(message).__name__}, which is not for an engine")

    def _replayed(self, message: Speculations | Winner) -> bool:
        """Whether the same was said before: what has been used once must not change."""
        if isinstance(message, Winner):
            return self._winner is not None
        return self._speculations is not None and self._speculations.complete


def _code_of(error: grpc.RpcError) -> str:
    return f"{error.code().name}" if isinstance(error, grpc.Call) else repr(error)
