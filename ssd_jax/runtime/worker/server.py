"""The worker's end of the gRPC streams; one session, with slots of its own, for each."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from ssd_jax.runtime.worker import codec
from ssd_jax.runtime.worker.messages import ProtocolError, Refused, Round
from ssd_jax.runtime.worker.session import Session

METHOD = "/ssd_jax.Draft/Stream"
UNLIMITED = (("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1))
_LOG = logging.getLogger(__name__)

MakeSession = Callable[[Callable[[], bool]], Session]
"""A new session, from a function that says whether another round waits."""


def serve(session: MakeSession, *, streams: int = 8) -> tuple[grpc.Server, int]:
    """Starts a server on a free port of the loopback interface.

    Args:
      session: for each stream.
      streams: most of them at a time; more wait.

    Returns: the server and its port.
    """
    # Without this, two workers could be given one port.
    server = grpc.server(
        ThreadPoolExecutor(streams), options=(*UNLIMITED, ("grpc.so_reuseport", 0))
    )

    def stream(requests: Iterator[bytes], _context: grpc.ServicerContext) -> Iterator[bytes]:
        return _answers(session, requests)

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

    def fill(self, requests: Iterator[bytes]) -> None:
        """Reads the stream to its end."""
        try:
            for data in requests:
                message = codec.decode(data)
                self._read += isinstance(message, Round)
                self._items.put(message)
        except ProtocolError as error:
            self._items.put(error)
        except Exception as error:  # the other side is gone; gRPC says so in many ways
            _LOG.debug("a stream ended: %r", error)
        self._items.put(None)

    def called(self) -> bool:
        """Whether another round waits."""
        return self._read > self._handled

    def messages(self) -> Iterator[Any]:
        """All of them.

        Raises:
          ProtocolError: one that is none.
        """
        while (message := self._items.get()) is not None:
            if isinstance(message, ProtocolError):
                raise message
            self._handled += isinstance(message, Round)
            yield message


def _answers(make: MakeSession, requests: Iterator[bytes]) -> Iterator[bytes]:
    """Answers one stream; what breaks the protocol ends this stream and no other."""
    inbox = _Inbox()
    threading.Thread(target=inbox.fill, args=(requests,), daemon=True).start()
    session = make(inbox.called)
    try:
        for message in inbox.messages():
            for answer in session.handle(message):
                yield codec.encode(answer)
    except ProtocolError as error:
        yield codec.encode(Refused(reason=str(error)))
    except Exception as error:
        _LOG.exception("a stream failed")
        yield codec.encode(Refused(reason=f"{type(error).__name__}: {error}"))
