"""A connection between two processes: frames in their order, and how it ends."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from collections.abc import Callable

_LENGTH = struct.Struct("<I")
MOST = 2**28
"""Bytes of a frame."""
_AT_ONCE = 2**16  # bytes that are asked for: a frame and its length, and those that follow
_BEATS = 4  # in the time that a host may be silent


class Frames:
    """One end of a connection.

    A frame is its length (4 bytes, little-endian) and so many bytes; one of none is a beat.

    Args:
      connected: a stream socket.
      silence: seconds without a frame after which the other end is lost; None is never.
      most: bytes of a frame.
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
        self._until: float | None = None  # time that all of a frame must have come by

    def start(self, take: Callable[[bytes], None], lost: Callable[[str], None]) -> None:
        """Begins to receive, and to beat four times in the silence that is allowed.

        Args:
          take: gets each frame, from a thread of its own.
          lost: told why no more come, once, unless it was closed at this end.
        """
        threading.Thread(target=self._receive, args=(take, lost), daemon=True, name="host").start()
        assert self._silence is not None
        self.beat(self._silence / _BEATS, lost)

    def beat(self, seconds: float, lost: Callable[[str], None] | None = None) -> None:
        """Begins to beat every so many seconds; see `start`."""
        threading.Thread(target=self._beat, args=(seconds, lost), daemon=True, name="beat").start()

    def send(self, frame: bytes) -> None:
        """Sends a frame.

        Raises:
          OSError: the other end does not take it.
        """
        if len(frame) > self.most:
            raise OSError(f"a message of {len(frame)} bytes is too long; at most {self.most} go")
        with self._sending:
            self._socket.sendall(_LENGTH.pack(len(frame)) + frame)

    def first(self, seconds: float, *, most: int) -> bytes:
        """The first frame, by which a stranger says who it is, if it has no more than `most` bytes
        and all of them come within so many seconds; see `receive`."""
        usual, self.most = self.most, most
        self._until = time.monotonic() + seconds
        try:
            return self.receive()
        finally:
            self.most, self._until = usual, None
            self._socket.settimeout(self._silence)

    def receive(self) -> bytes:
        """The next frame, which may be a beat.

        Raises:
          OSError: none comes, or it is too long.
        """
        (length,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if length > self.most:
            raise OSError(f"it has sent a message of {length} bytes; at most {self.most} go")
        return self._exactly(length)

    def close(self) -> None:
        """Ends the connection, which loses nothing that was sent."""
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
        except Exception as error:  # a thread that ended without a word would leave all waiting
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
        """What an error of `receive` or `send` means."""
        if isinstance(error, TimeoutError):
            return f"it was silent for {self._silence:g} s"
        if isinstance(error, OSError):
            return error.strerror or str(error)
        return f"what it has sent could not be taken: {error!r}"
