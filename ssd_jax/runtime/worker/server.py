"""The worker's end of the gRPC streams; one session, with slots of its own, for each."""

from __future__ import annotations

import logging
import queue
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ssd_jax.runtime.worker import codec
from ssd_jax.runtime.worker.messages import Hello, ProtocolError, Refused, Round
from ssd_jax.runtime.worker.session import Session
from ssd_jax.runtime.worker.transport import METHOD, options

STREAMS = 64
"""Most streams at a time: an engine has one for as long as it lives."""
GREETING = 10.0
"""Seconds until a stream without a `Hello` is ended."""
_TRACEBACK = 4000  # characters of it that an engine is sent
_LOG = logging.getLogger(__name__)

MakeSession = Callable[[Callable[[], bool]], Session]
"""A new session, from a function that says whether another round waits."""


def serve(
    session: MakeSession, about: Hello, *, streams: int = STREAMS, greeting: float = GREETING
) -> tuple[grpc.Server, int]:
    """Starts a server on a free port of the loopback interface.

    Args:
      session: for each stream.
      about: what the worker is.
      streams: most of them at a time; others are refused.
      greeting: seconds until a stream without a `Hello` is ended.

    Returns: the server and its port.
    """
    free = threading.BoundedSemaphore(streams)
    # Threads beyond the streams refuse others. Without the option two workers may get one port.
    server = grpc.server(
        ThreadPoolExecutor(streams + 4), options=(*options(about), ("grpc.so_reuseport", 0))
    )

    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        if not free.acquire(blocking=False):
            reason = f"it serves {streams} engines already, and no more; close some"
            yield codec.encode(Refused(reason=reason))
            return
        try:
            yield from _answers(session, requests, greeting)
        finally:
            free.release()

    server.add_generic_rpc_handlers([_Handler(grpc.stream_stream_rpc_method_handler(stream))])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    return server, port


class _Handler(grpc.GenericRpcHandler):
    """Bytes in, bytes out."""

    def __init__(self, handler: grpc.RpcMethodHandler) -> None:
        self._handler = handler

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """See `grpc.GenericRpcHandler.service`."""
        return self._handler if handler_call_details.method == METHOD else None


class _Inbox:
    """Messages of one stream, read ahead; the last item is None."""

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._read, self._handled = 0, 0  # rounds; each is changed by one thread only
        self.admitted = threading.Event()
        """Set when more than one message may be read: who is not known leaves no heap of them."""

    def fill(self, requests: Iterator[bytes]) -> None:
        """Reads the stream to its end."""
        try:
            for data in requests:
                message = codec.decode(data)
                self._read += isinstance(message, Round)
                self._items.put(message)
                self.admitted.wait()
        except ProtocolError as error:
            self._items.put(error)
        except Exception as error:  # the other side is gone; gRPC says so in many ways
            _LOG.debug("a stream ended: %r", error)
        self._items.put(None)

    def called(self) -> bool:
        """Whether another round waits."""
        return self._read > self._handled

    def messages(self, greeting: float) -> Iterator[Any]:
        """All of them; waits `greeting` seconds for the first.

        Raises:
          ProtocolError: one that is none, or none at all in time.
        """
        while (message := self._next(greeting)) is not None:
            if isinstance(message, ProtocolError):
                raise message
            self._handled += isinstance(message, Round)
            yield message

    def _next(self, greeting: float) -> Any:
        try:
            return self._items.get(timeout=None if self.admitted.is_set() else greeting)
        except queue.Empty:
            raise ProtocolError(f"no Hello within {greeting:.0f} s") from None


def _answers(make: MakeSession, requests: Iterator[bytes], greeting: float) -> Iterator[bytes]:
    """Answers one stream; what breaks the protocol ends this stream and no other."""
    inbox = _Inbox()
    threading.Thread(target=inbox.fill, args=(requests,), daemon=True).start()
    session = make(inbox.called)
    try:
        for message in inbox.messages(greeting):
            for answer in session.handle(message):
                yield codec.encode(answer)
            inbox.admitted.set()
    except ProtocolError as error:
        yield codec.encode(Refused(reason=str(error)))
    except Exception as error:
        _LOG.exception("a stream failed")
        where = traceback.format_exc()[-_TRACEBACK:]
        yield codec.encode(Refused(reason=f"{type(error).__name__}: {error}\n{where}"))
    finally:
        inbox.admitted.set()
