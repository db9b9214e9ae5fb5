"""One thread that accepts connections until they prove a secret; each then gets its own thread."""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from ssd_jax.wire import handshake
from ssd_jax.wire.frames import MAX_FRAME, READ_SIZE, Frames, take_frame, with_length
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.sockets import Endpoint
from ssd_jax.wire.tls import Tls

_PAUSE = 0.1  # seconds after a connection could not be accepted
_POLL = 1.0  # seconds, most until a thread sees that it is to end
_MAX_STRANGER_BYTES = 2**16  # most bytes of a stranger: its certificates, above all
_LOG = logging.getLogger(__name__)


class Limits(NamedTuple):
    """Limits of strangers: connections whose other end has not proved that it knows the secret.

    Attributes:
      strangers: how many there are at a time; then the oldest is ended for one more.
      grace: seconds for which it does not; others wait in the system's queue.
      seconds: until a stranger is ended in any case.
    """

    strangers: int = 256
    grace: float = 1.0
    seconds: float = 10.0


class Listener:
    """Serves those who know a secret.

    Strangers cost a file each, no thread, and little memory. However many there are, all are read
    in turn, for as long as the limits say: nobody with the secret is kept out.

    Args:
      endpoint: where it listens; closed when this ends.
      secret: what both ends must know.
      serve: is called with each connection whose other end knows it, in a separate thread.
      silence, size: of such connections, see `Frames`.
      tls: this end's certificates; None is plain text.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        secret: str,
        serve: Callable[[Frames], None],
        refusals: Refusals,
        *,
        silence: float | None = None,
        size: int = MAX_FRAME,
        tls: ssl.SSLContext | None = None,
        limits: Limits = Limits(),  # noqa: B008 (immutable)
    ) -> None:
        self._endpoint, self._secret, self._serve = endpoint, secret.encode(), serve
        self._refusals, self._tls, self._limits = refusals, tls, limits
        self._frames = functools.partial(Frames, silence=silence, max_bytes=size)
        self._strangers: dict[_Stranger, None] = {}  # oldest first
        self._resume = 0.0  # time before which nothing is accepted
        self._selector = selectors.DefaultSelector()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listener", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Accepts no more, and ends strangers; connections that are served go on."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._endpoint.socket.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(2 * _POLL)

    def _run(self) -> None:
        with self._selector, self._endpoint.socket:
            while not self._closed.is_set():
                try:
                    self._step()
                except Exception:  # whatever a stranger has caused, others are served
                    _LOG.exception("connections")
                    self._closed.wait(_PAUSE)
            for stranger in list(self._strangers):
                self._end(stranger)
        if self._endpoint.file >= 0:
            os.close(self._endpoint.file)

    def _step(self) -> None:
        for key, _ in self._selector.select(self._prepare()):
            if key.data is None:
                self._accept()
            elif key.data in self._strangers:  # it was not ended for another just now
                self._read(key.data)

    def _prepare(self) -> float:
        """Ends strangers whose time is up, and looks whether another is accepted; returns the
        seconds until the next time it must do so."""
        now, limits = time.monotonic(), self._limits
        while self._strangers and (oldest := next(iter(self._strangers))).deadline <= now:
            self._refusals.log("silent", f"{oldest.name} said nothing for {limits.seconds:g} s")
            self._end(oldest)
        times = [now + _POLL, self._resume]
        if self._strangers:
            oldest = next(iter(self._strangers))
            times.append(oldest.deadline)
            if len(self._strangers) >= limits.strangers:
                times.append(oldest.opened + limits.grace)
        may_accept = now >= self._resume and (
            len(self._strangers) < limits.strangers or times[-1] <= now
        )
        listener = self._endpoint.socket
        if may_accept != (listener.fileno() in self._selector.get_map()):
            if may_accept:
                self._selector.register(listener, selectors.EVENT_READ)
            else:
                self._selector.unregister(listener)
        return max(0.0, min(time for time in times if time > now) - now)

    def _accept(self) -> None:
        try:
            connection, address = self._endpoint.socket.accept()
        except OSError as error:  # no file to be had, or the end
            _LOG.debug("no connection is accepted: %s", error)
            self._resume = time.monotonic() + _PAUSE
            return
        if len(self._strangers) >= self._limits.strangers:
            self._end(next(iter(self._strangers)))
        name = address[0].removeprefix("::ffff:") if address else "a process of this host"
        with contextlib.suppress(OSError):  # it has left
            stranger = _Stranger(connection, name, self._tls, self._limits.seconds)
            self._selector.register(connection, selectors.EVENT_READ, stranger)
            self._strangers[stranger] = None

    def _read(self, stranger: _Stranger) -> None:
        try:
            is_admitted = stranger.read(self._secret)
        except handshake.RefusedError as error:
            self._refusals.log(error.kind, f"{stranger.name}: {error}")
        except ssl.SSLError as error:
            self._refusals.log("tls", f"{stranger.name}: {error.strerror or error}")
        except OSError as error:
            _LOG.debug("%s has left: %s", stranger.name, error)
        else:
            if is_admitted:
                self._serve_stream(stranger)
            return
        self._end(stranger)

    def _serve_stream(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        frames = self._frames(stranger.socket, tls=stranger.tls, received=bytes(stranger.received))
        try:
            threading.Thread(target=self._serve, args=(frames,), name="stream", daemon=True).start()
        except RuntimeError as error:
            _LOG.debug("no stream is taken: %s", error)
            frames.close()
            stranger.socket.close()

    def _forget(self, stranger: _Stranger) -> None:
        del self._strangers[stranger]
        self._selector.unregister(stranger.socket)

    def _end(self, stranger: _Stranger) -> None:
        self._forget(stranger)
        stranger.socket.close()


class _Stranger:
    """A connection whose other end has not proved anything.

    Args:
      name: who it is, for the log.
      tls: see `Listener`.
      seconds: until it is ended.

    Attributes:
      opened, deadline: when it came, and when it is ended, on the monotonic clock.
      received: bytes that followed its proof.
    """

    def __init__(
        self, connection: socket.socket, name: str, tls: ssl.SSLContext | None, seconds: float
    ) -> None:
        connection.setblocking(False)
        self.socket, self.name = connection, name
        self.opened = time.monotonic()
        self.deadline = self.opened + seconds
        self.tls = None if tls is None else Tls(tls)
        self.received = bytearray()
        self._hello, self._received_bytes = handshake.hello(), 0
        if tls is None:
            self._send_frame(self._hello)

    def read(self, secret: bytes) -> bool:
        """Takes what has come; returns whether the other end has proved that it knows the secret.

        Raises:
          RefusedError: it does not.
          OSError: it has left, or what it sends is no TLS.
        """
        data = self.socket.recv(READ_SIZE)
        self._received_bytes += len(data)
        if not data or self._received_bytes > _MAX_STRANGER_BYTES:
            raise OSError("it has left, or does not come to an end")
        self.received += data if self.tls is None else self._decrypted(self.tls, data)
        try:
            answer = take_frame(self.received, handshake.MAX_FRAME)
        except OSError as error:
            raise handshake.RefusedError("it speaks another protocol", "protocol") from error
        if answer is None:
            return False
        try:
            self._send_frame(handshake.admit(secret, self._hello, answer))
        except handshake.RefusedError as error:
            self._send_frame(handshake.refusal(error))
            raise
        return True

    def _decrypted(self, tls: Tls, data: bytes) -> bytes:
        was_ready = tls.ready
        try:
            plain = tls.decrypt(data)
        finally:
            self._send(tls.encrypt(b""))  # also why it does not agree
        if tls.ready and not was_ready:
            self._send_frame(self._hello)
        return plain

    def _send_frame(self, frame: bytes) -> None:
        data = with_length(frame)
        self._send(data if self.tls is None else self.tls.encrypt(data))

    def _send(self, data: bytes) -> None:
        if data and self.socket.send(data) < len(data):
            raise OSError("it takes nothing")
