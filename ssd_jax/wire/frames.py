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
MAX_FRAME = 2**28
"""Most bytes of a frame."""
READ_SIZE = 2**16
"""Most bytes of one read: a frame with its length, and frames that follow."""
_BEATS_PER_SILENCE = 4  # per the time that a host may be silent


def with_length(frame: bytes) -> bytes:
    """A frame as it is sent: its length (4 bytes, little-endian) and its bytes."""
    return _LENGTH.pack(len(frame)) + frame


def take_frame(buffer: bytearray, max_bytes: int) -> bytes | None:
    """Removes the first frame from what was received; None if it has not come whole.

    Raises:
      OSError: the frame is longer than `max_bytes` bytes.
    """
    if len(buffer) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack_from(buffer)
    if length > max_bytes:
        raise OSError(f"it has sent a message of {length} bytes; at most {max_bytes} go")
    end = _LENGTH.size + length
    if len(buffer) < end:
        return None
    frame = bytes(memoryview(buffer)[_LENGTH.size : end])
    del buffer[:end]
    return frame


class Frames:
    """One end of a connection; an empty frame is a beat.

    One thread may receive while others send.

    Args:
      connection: a stream socket.
      silence: seconds without a frame after which the other end is lost; None is never.
      max_bytes: most bytes of a frame.
      tls: encryption that both ends have agreed on; None is plain text.
      received: bytes that have been received already.

    Attributes:
      silence, max_bytes: may be changed.
    """

    def __init__(
        self,
        connection: socket.socket,
        silence: float | None,
        *,
        max_bytes: int = MAX_FRAME,
        tls: Tls | None = None,
        received: bytes = b"",
    ) -> None:
        connection.setblocking(False)
        if connection.family != socket.AF_UNIX:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.silence, self.max_bytes = silence, max_bytes
        self._socket, self._tls = connection, tls
        self._readable = select.poll()
        self._readable.register(connection, select.POLLIN)
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
        with self._within(seconds):
            try:
                tls.decrypt(b"")
                self._send_raw(tls.encrypt(b""))
                while not tls.ready:
                    self._received += tls.decrypt(self._receive_bytes())
                    self._send_raw(tls.encrypt(b""))
            except OSError:
                with contextlib.suppress(OSError):
                    self._send_raw(tls.encrypt(b""))  # which says why
                raise
        self._tls = tls

    def start(self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None]) -> None:
        """Starts to receive, and to send four beats per allowed silence.

        Args:
          on_frame: is called with each frame, in a separate thread.
          on_lost: is called once, with the reason, when the connection ends, unless this end closed
            it.
        """
        threading.Thread(
            target=self._receive_all, args=(on_frame, on_lost), daemon=True, name="host"
        ).start()
        assert self.silence is not None
        self.start_beats(self.silence / _BEATS_PER_SILENCE, on_lost)

    def start_beats(self, seconds: float, on_lost: Callable[[str], None] | None = None) -> None:
        """Starts a thread that sends a beat every `seconds`, and what `send` has queued.

        Args:
          on_lost: as in `start`.
        """
        threading.Thread(
            target=self._send_beats, args=(seconds, on_lost), daemon=True, name="beat"
        ).start()

    def send(self, frame: bytes, *, wait: bool = True) -> None:
        """Sends a frame.

        Args:
          wait: whether to wait until the frame has left; otherwise the thread of `start_beats`
            sends what the system does not take at once.

        Raises:
          OSError: the frame is too long, or the other end does not take it, which ends the
            connection: a part may have been sent, which no other frame can follow.
        """
        if len(frame) > self.max_bytes:
            raise OSError(
                f"a message of {len(frame)} bytes is too long; at most {self.max_bytes} go"
            )
        data = with_length(frame)
        try:
            with self._sending:
                self._send_or_queue(data if self._tls is None else self._tls.encrypt(data))
                is_queued = bool(self._unsent)
                if is_queued and not wait:
                    self._sending.notify_all()
            if is_queued and wait:
                self._send_all_queued()
        except OSError as error:
            self._fail(error)
            raise

    def flush(self, timeout: float) -> bool:
        """Waits up to `timeout` seconds until all frames have left; returns whether they have."""
        with self._sending:
            self._sending.wait_for(lambda: not self._unsent or self._closed, timeout)
            return not self._unsent

    def receive_first(self, seconds: float, *, max_bytes: int) -> bytes:
        """Receives a frame of up to `max_bytes` bytes, which must arrive whole within `seconds`.

        Raises:
          OSError: it does not arrive, or is too long.
        """
        with self._within(seconds):
            return self._next_frame(max_bytes)

    def receive(self) -> bytes:
        """Receives the next frame, which may be a beat.

        Raises:
          OSError: no frame comes, or it is too long.
        """
        return self._next_frame(self.max_bytes)

    def close(self) -> None:
        """Ends the connection; what has left is not lost."""
        with self._sending:
            self._closed = True
            self._sending.notify_all()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def end_reason(self, error: Exception) -> str:
        """Why the connection has ended, given the error of `receive` or `send`."""
        error = self._failure or error
        if isinstance(error, TimeoutError):
            return str(error) or f"it was silent for {self.silence:g} s"
        if isinstance(error, OSError):
            return error.strerror or str(error)
        return f"what it has sent could not be taken: {error!r}"

    @contextlib.contextmanager
    def _within(self, seconds: float):
        self._deadline = time.monotonic() + seconds
        try:
            yield
        finally:
            self._deadline = None

    def _next_frame(self, max_bytes: int) -> bytes:
        while (frame := take_frame(self._received, max_bytes)) is None:
            data = self._receive_bytes()
            self._received += data if self._tls is None else self._tls.decrypt(data)
        return frame

    def _receive_bytes(self) -> bytes:
        """The next bytes from the socket."""
        while True:
            wait = self.silence
            if self._deadline is not None:
                wait = max(0.0, self._deadline - time.monotonic())
            if not self._readable.poll(None if wait is None else 1e3 * wait):
                raise TimeoutError(*(["it does not answer"] if self._deadline is not None else []))
            try:
                data = self._socket.recv(READ_SIZE)
            except BlockingIOError:
                continue
            if not data:
                raise ConnectionError("its connection was closed")
            return data

    def _send_raw(self, data: bytes) -> None:
        with self._sending:
            self._send_or_queue(data)
        self._send_all_queued()

    def _send_or_queue(self, data: bytes) -> None:
        """Sends what the system takes now, and keeps the rest; the caller holds `_sending`."""
        if not self._unsent:
            with contextlib.suppress(BlockingIOError):
                count = self._socket.send(data)
                if count == len(data):
                    return
                data = data[count:]
        self._unsent += data

    def _send_queued(self) -> None:
        """Sends what the system takes now of what was kept; the caller holds `_sending`."""
        while self._unsent:
            try:
                count = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:count]
            if not self._unsent:
                self._sending.notify_all()

    def _send_all_queued(self) -> None:
        """Waits until everything has left."""
        while True:
            with self._sending:
                self._send_queued()
                if not self._unsent:
                    return
            writable = select.poll()  # one thread may use it at a time
            writable.register(self._socket, select.POLLOUT)
            if not writable.poll(None if self.silence is None else 1e3 * self.silence):
                raise TimeoutError(f"it took nothing for {self.silence:g} s")

    def _receive_all(
        self, on_frame: Callable[[bytes], None], on_lost: Callable[[str], None]
    ) -> None:
        try:
            while True:
                if frame := self.receive():
                    on_frame(frame)
        except Exception as error:  # or all would wait for a dead thread
            self._fail(error, on_lost)

    def _send_beats(self, seconds: float, on_lost: Callable[[str], None] | None) -> None:
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
                    self._send_all_queued()
        except OSError as error:
            self._fail(error, on_lost)

    def _fail(self, error: Exception, on_lost: Callable[[str], None] | None = None) -> None:
        """Ends the connection, unless it has ended; the first failure is why."""
        with self._sending:
            if self._closed:
                return
            self._failure = self._failure or error
        self.close()
        if on_lost is not None:
            on_lost(self.end_reason(error))
