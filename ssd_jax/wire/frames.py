"""A connection between two processes: frames in order, beats, and how it ends."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading
import time
from collections.abc import Callable

from ssd_jax.wire.tls import Tls

_LENGTH = struct.Struct("<I")
MOST = 2**28
"""Most bytes of a frame."""
AT_ONCE = 2**16
"""Most bytes of one read: a frame with its length, and frames that follow."""
_BEATS = 4  # per the time that a host may be silent


def framed(frame: bytes) -> bytes:
    """A frame as it is sent: its length (4 bytes, little-endian) and its bytes."""
    return _LENGTH.pack(len(frame)) + frame


def take_frame(received: bytearray, most: int) -> bytes | None:
    """Removes the first frame from what was received; None if it has not come whole.

    Raises:
      OSError: the frame is longer than `most` bytes.
    """
    if len(received) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(received)
    if length > most:
        raise OSError(f"it has sent a message of {length} bytes; at most {most} go")
    end = _LENGTH.size + length
    if len(received) < end:
        return None
    frame = bytes(memoryview(received)[_LENGTH.size : end])
    del received[:end]
    return frame


class Frames:
    """One end of a connection; an empty frame is a beat.

    One thread may receive while others send.

    Args:
      connected: a stream socket.
      silence: seconds without a frame after which the other end is lost; None is never.
      most: most bytes of a frame.
      tls: encryption that both ends have agreed on; None is plain text.
      received: bytes that have been received already.

    Attributes:
      silence, most: as given; may be changed.
    """

    def __init__(
        self,
        connected: socket.socket,
        silence: float | None,
        *,
        most: int = MOST,
        tls: Tls | None = None,
        received: bytes = b"",
    ) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.silence, self.most = silence, most
        self._socket, self._tls = connected, tls
        self._readable = select.poll()
        self._readable.register(connected, select.POLLIN)
        self._sending = threading.Condition()  # nobody waits for the other end while holding it
        self._unsent = bytearray()
        self._received = bytearray(received)
        self._deadline: float | None = None  # of a whole frame
        self._closed = False
        self._failure: Exception | None = None

    def encrypt(self, tls: Tls, seconds: float) -> None:
        """Agrees on encryption with the other end, as its client.

        Raises:
          OSError: the other end is not who it should be, or does not answer within `seconds`.
        """
        with self._until(seconds):
            try:
                tls.decrypt(b"")
                self._send_raw(tls.encrypt(b""))
                while not tls.ready:
                    self._received += tls.decrypt(self._arrived())
                    self._send_raw(tls.encrypt(b""))
            except OSError:
                with contextlib.suppress(OSError):
                    self._send_raw(tls.encrypt(b""))  # which says why
                raise
        self._tls = tls

    def start(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """Starts to receive, and to send four beats per allowed silence.

        Args:
          take: is called with each frame, in a separate thread.
          lost: is called once, with the reason, when the connection ends, unless this end closed
            it.
        """
        threading.Thread(target=self._receive, args=(take, lost), daemon=True, name="host").start()
        assert self.silence is not None
        self.beat(self.silence / _BEATS, lost)

    def beat(self, seconds: float, lost: Callable[[str], None] | None = None) -> None:
        """Starts a thread that sends a beat every `seconds`, and what `send` left; see `start`."""
        threading.Thread(target=self._beat, args=(seconds, lost), daemon=True, name="beat").start()

    def send(self, frame: bytes, *, wait: bool = True) -> None:
        """Sends a frame.

        Args:
          wait: whether to wait until the frame has left; otherwise the thread of `beat` sends what
            the system does not take at once.

        Raises:
          OSError: the frame is too long, or the other end does not take it, which ends the
            connection: a part may have been sent, which no other frame can follow.
        """
        if len(frame) > self.most:
            raise OSError(f"a message of {len(frame)} bytes is too long; at most {self.most} go")
        data = framed(frame)
        try:
            with self._sending:
                self._queue(data if self._tls is None else self._tls.encrypt(data))
                left = bool(self._unsent)
                if left and not wait:
                    self._sending.notify_all()
            if left and wait:
                self._drain()
        except OSError as error:
            self._fail(error)
            raise

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until all frames have left; returns whether they have."""
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent or self._closed, timeout)
            return not self._unsent

    def first(self, seconds: float, *, most: int) -> bytes:
        """Receives a frame of up to `most` bytes, which must arrive whole within `seconds`. See
        `receive`."""
        with self._until(seconds):
            return self._next(most)

    def receive(self) -> bytes:
        """Receives the next frame, which may be a beat.

        Raises:
          OSError: no frame comes, or it is too long.
        """
        return self._next(self.most)

    def close(self) -> None:
        """Ends the connection; what has left is not lost."""
        with self._sending:
            self._closed = True
            self._sending.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def why(self, error: Exception) -> str:
        """Why the connection has ended, given the error of `receive` or `send`."""
        error = self._failure or error
        if isinstance(error, TimeoutError):
            return str(error) or f"it was silent for {self.silence:g} s"
        if isinstance(error, OSError):
            return error.strerror or str(error)
        return f"what it has sent could not be taken: {error!r}"

    @contextlib.contextmanager
    def _until(self, seconds: float):
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def _next(self, most: int) -> bytes:
        while (frame := take_frame(self._received, most)) is None:
            data = self._arrived()
            self._received += data if self._tls is None else self._tls.decrypt(data)
        return frame

    def _arrived(self) -> bytes:
        """The next bytes from the socket."""
        while True:
            wait = self.silence
            if self._deadline is not None:
                wait = max(0.0, self._deadline - time.monotonic())
            if not self._readable.poll(None if wait is None else 1e3 * wait):
                raise TimeoutError(*(["it does not answer"] if self._deadline is not None else []))
            try:
                data = self._socket.recv(AT_ONCE)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionError("its connection was closed")
            return data

    def _send_raw(self, data: bytes) -> None:
        with self._sending:
            self._queue(data)
        self._drain()

    def _queue(self, data: bytes) -> None:
        """Sends what the system takes now, and keeps the rest; the caller holds `_sending`."""
        if not self._unsent:
            with contextlib.suppress(BlockingIOError):
                count = self._socket.send(data)
                if count == len(data):
                    return
                data = data[count:]
        self._unsent += data

    def _push(self) -> None:
        """Sends what the system takes now of what was kept; the caller holds `_sending`."""
        while self._unsent:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:count]
            if not self._unsent:
                self._sending.notify_all()

    def _drain(self) -> None:
        """Waits until everything has left."""
        while True:
            with self._sending:
                self._push()
                if not self._unsent:
                    return
            writable = select.poll()  # one thread may use it at a time
            writable.register(self._socket, select.POLLOUT)
            if not writable.poll(None if self.silence is None else 1e3 * self.silence):
                raise TimeoutError(f"it took nothing for {self.silence:g} s")

    def _receive(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        try:
            while True:
                if frame := self.receive():
                    take(frame)
        except Exception as error:  # or all would wait for a dead thread
            self._fail(error, lost)

    def _beat(self, seconds: float, lost: Callable[[str], None] | None) -> None:
        try:
            while True:
                with self._sending:
                    self._sending.wait_for(lambda: self._unsent or self._closed, seconds)
                    idle = not self._unsent
                if self._closed:
                    return
                if idle:
                    self.send(b"")
                else:
                    self._drain()
        except OSError as error:
            self._fail(error, lost)

    def _fail(self, error: Exception, lost: Callable[[str], None] | None = None) -> None:
        """Ends the connection, unless it has ended; the first failure is why."""
        with self._sending:
            if self._closed:
                return
            self._failure = self._failure or error
        self.close()
        if lost is not None:
            lost(self.why(error))
