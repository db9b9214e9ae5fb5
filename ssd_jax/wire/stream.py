"""A stream between an engine and its worker, wherever that is."""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator

from ssd_jax.wire import handshake
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.listener import Limits, Listener
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.sockets import Endpoint, connect, host_of
from ssd_jax.wire.tls import Tls

BEAT = 0.5
"""Seconds between two signs of life, which a thread gives, however long its process computes."""
SILENCE = 2.0
"""Seconds without one after which an engine gives up a stream."""
_LOADING_SILENCE = 10.0  # the same before the first message: loading may keep all threads
_HANDSHAKE = 10.0  # seconds for each step until a worker has let the engine in
_MAX_OTHER_BYTES = 2**16  # bytes of everything except arrays: an opening with its stop strings
_LOG = logging.getLogger(__name__)

ServeStream = Callable[[Iterator[bytes]], Iterator[bytes]]
"""Serves a stream at a worker: answers, given the messages of an engine."""


class StreamError(Exception):
    """A stream has ended without a message from the worker.

    Args:
      reason: why it has ended.
      refused: whether one end refuses the other.
    """

    def __init__(self, reason: str, *, refused: bool = False) -> None:
        super().__init__(reason)
        self.refused = refused


class Stream:
    """An engine's end of a stream. What it does never waits, except for `answers` and `flush`.

    Args:
      address: see `sockets.connect`.
      token: secret that the worker knows, too.
      size: most bytes of a message.
      tls: whom to trust, and this end's certificate; None is plain text.

    Attributes:
      admitted: whether the worker has let it in.
    """

    def __init__(
        self, address: str, token: str, size: int, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.admitted = False
        self._address, self._token, self._size, self._tls = address, token.encode(), size, tls
        self._changed = threading.Condition()
        self._unsent: list[bytes] = []  # messages from before the stream is open
        self._frames: Frames | None = None
        self._socket: socket.socket | None = None
        self._closed = False

    def send(self, data: bytes) -> None:
        """Sends a message; raises nothing, since `answers` reports why nothing arrives."""
        with self._changed:
            if self._frames is None:
                self._unsent.append(data)
                return
        self._send(self._frames, data)

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until all messages have left; returns whether they have."""
        deadline = time.monotonic() + timeout
        with self._changed:
            self._changed.wait_for(lambda: self._frames is not None or self._closed, timeout)
        return self._frames is not None and self._frames.flush(
            max(0.0, deadline - time.monotonic())
        )

    def answers(self) -> Iterator[bytes]:
        """Opens the stream; messages from the worker, until it ends the stream.

        Raises:
          StreamError: the stream broke, or was not opened.
        """
        try:
            frames = self._open()
        except (OSError, handshake.RefusedError) as error:
            self.close()
            os_error = isinstance(error, OSError) and error.strerror
            refused = isinstance(error, handshake.RefusedError)
            raise StreamError(os_error or str(error), refused=refused) from None
        try:
            while True:
                if frame := frames.receive():
                    frames.silence = SILENCE
                    yield frame
        except OSError as error:
            raise StreamError(frames.end_reason(error)) from None

    def close(self) -> None:
        """Ends the stream."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._frames is not None:
            self._frames.close()
        elif self._socket is not None:
            with contextlib.suppress(OSError):
                self._socket.shutdown(socket.SHUT_RDWR)

    def _open(self) -> Frames:
        connection = connect(self._address, _HANDSHAKE, self._set_socket)
        self._set_socket(connection)
        frames = Frames(connection, _LOADING_SILENCE)
        if self._tls is not None:
            frames.encrypt(Tls(self._tls, host_of(self._address)), _HANDSHAKE)
        handshake.enter(frames, self._token, _HANDSHAKE)
        frames.start_beats(BEAT)
        frames.max_bytes = self._size
        with self._changed:
            self.admitted = True
            for data in self._unsent:
                self._send(frames, data)
            self._unsent.clear()
            self._frames = frames
            self._changed.notify_all()
        if self._closed:
            frames.close()
        return frames

    def _set_socket(self, connecting: socket.socket) -> None:
        """Makes `close` end the wait for a connection."""
        self._socket = connecting
        if self._closed:
            raise ConnectionError("it was closed")

    def _send(self, frames: Frames, data: bytes) -> None:
        try:
            frames.send(data, wait=False)
        except OSError as error:
            _LOG.debug("a message was not sent: %s", error)
            frames.close()


OpenStream = Callable[[str, str, int], Stream]
"""Opens a stream to an address, with a token and the most bytes of a message."""


class StreamServer:
    """Serves streams of engines that know a token.

    Args:
      answers: serves one stream.
      endpoint: where it listens.
      token: the secret.
      size: most bytes of a message.
      refusals: logs who is refused.
      silence: seconds without a sign of life after which an engine is gone; None is never.
      tls, limits: see `Listener`.

    Attributes:
      address: for `Stream`.
    """

    def __init__(
        self,
        answers: ServeStream,
        endpoint: Endpoint,
        token: str,
        size: int,
        refusals: Refusals,
        *,
        silence: float | None = None,
        tls: ssl.SSLContext | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
    ) -> None:
        self.address = endpoint.address
        self._answers = answers
        self._lock = threading.Lock()
        self._streams: set[Frames] | None = set()  # None after the end
        self._listener = Listener(
            endpoint, token, self._serve, refusals,
            silence=silence, size=size, tls=tls, limits=limits,
        )  # fmt: skip

    def stop(self) -> None:
        """Ends all streams, and accepts no more."""
        with self._lock:
            streams, self._streams = self._streams or (), None
        self._listener.stop()
        for frames in streams:
            frames.close()

    def _serve(self, frames: Frames) -> None:
        with self._lock:
            if self._streams is None:
                frames.close()
                return
            self._streams.add(frames)
        try:
            frames.start_beats(BEAT)
            for answer in self._answers(_messages(frames)):
                frames.send(answer)
        except (OSError, RuntimeError) as error:  # the engine is gone, or no thread is to be had
            _LOG.debug("a stream ended: %s", error)
        finally:
            frames.close()
            with self._lock:
                if self._streams is not None:
                    self._streams.discard(frames)


def _messages(frames: Frames) -> Iterator[bytes]:
    while True:
        if frame := frames.receive():
            yield frame


def message_size(spec: DraftSpec) -> int:
    """Most bytes of any useful message."""
    rows = spec.slots * (spec.context + 4 * (spec.k + 4))
    branches = spec.slots * spec.branches * (2 * spec.k + 2)
    q = 2 * spec.slots * spec.k * (spec.support + 1)
    return min(2 * (_MAX_OTHER_BYTES + 4 * (rows + branches + q)), 2**31 - 1)
