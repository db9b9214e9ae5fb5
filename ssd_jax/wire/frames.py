"""A connection between two processes: frames in order, beats, and how it ends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
MOST = 2**28
"""Most bytes of a frame."""
_AT_ONCE = 2**16  # bytes of one read: a frame with its length, and frames that follow
_BEATS = 4  # per the time that a host may be silent


class Frames:
    """One end of a connection.

    A frame is its length (4 bytes, little-endian) and that many bytes; an empty frame is a beat.

    Args:
      connected: a stream socket.
      silence: seconds without a frame after which the other end is lost; None is never.
      most: most bytes of a frame.
    """

    def __init__(
        self, connected: socket.socket, silence: float | None, *, most: int = MOST
    ) -> None:
        connected.settimeout(silence)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket, self._silence, self.most = connected, silence, most
        self._sending, self._closed = threading.Lock(), threading.Event()
        self._received = bytearray()
        self._until: float | None = None  # deadline for a whole frame

    def start(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """Starts to receive, and to send four beats per allowed silence.

        Args:
          take: is called with each frame, in a separate thread.
          lost: is called once, with the reason, when the connection ends, unless this end closed
            it.
        """
        threading.Thread(target=self._receive, args=(take, lost), daemon=True, name="host").start()
        assert self._silence is not None
        self.beat(self._silence / _BEATS, lost)

    def beat(self, seconds: float, lost: Callable[[str], None] | None = None) -> None:
        """Starts to send a beat every `seconds`; see `start`."""
        threading.Thread(target=self._beat, args=(seconds, lost), daemon=True, name="beat").start()

    def send(self, frame: bytes) -> None:
        """Sends a frame.

        Raises:
          OSError: the frame is too long, or the other end does not take it.
        """
        if len(frame) > self.most:
            raise OSError(f"a message of {len(frame)} bytes is too long; at most {self.most} go")
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def first(self, seconds: float, *, most: int) -> bytes:
        """Receives the first frame, by which the other end identifies itself; it may have up to
        `most` bytes and must arrive whole within `seconds`. See `receive`."""
        usual, self.most = self.most, most
        self._until = time.monotonic() + seconds
        try:
            return self.receive()
        finally:
            self.most, self._until = usual, None
            self._socket.settimeout(self._silence)

    def receive(self) -> bytes:
        """Receives the next frame, which may be a beat.

        Raises:
          OSError: no frame comes, or it is too long.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > self.most:
            raise OSError(f"it has sent a message of {length} bytes; at most {self.most} go")
        return self._exactly(length)

    def close(self) -> None:
        """Ends the connection; what was sent is not lost."""
        self._closed.set()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _exactly(self, count: int) -> bytes:
        received = self._received
        while len(received) < count:
            if self._until is not None:
                self._socket.settimeout(max(1e-3, self._until - time.monotonic()))
            part = self._socket.recv(_AT_ONCE)
            if not part:
                raise ConnectionError("its connection was closed")
            received += part
        found = bytes(memoryview(received)[:count])
        del received[:count]
        return found

    def _receive(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        try:
            while True:
                if frame := self.receive():
                    take(frame)
        except Exception as error:  # or all would wait for a dead thread
            self._tell(error, lost)

    def _beat(self, seconds: float, lost: Callable[[str], None] | None) -> None:
        try:
            while not self._closed.wait(seconds):
                self.send(b"")
        except OSError as error:
            if lost is not None:
                self._tell(error, lost)

    def _tell(self, error: Exception, lost: Callable[[str], None]) -> None:
        if not self._closed.is_set():
            self._closed.set()
            lost(self.why(error))

    def why(self, error: Exception) -> str:
        """Words for an error of `receive` or `send`."""
        if isinstance(error, TimeoutError):
            return f"it was silent for {self._silence:g} s"
        if isinstance(error, OSError):
            return error.strerror or str(error)
        return f"what it has sent could not be taken: {error!r}"
