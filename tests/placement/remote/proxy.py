"""A link between an engine and a worker on another host, which can be cut, slow, or lossy."""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time

RESENT = 0.2
"""Seconds until TCP sends again what was lost, at least; all behind it waits, too."""


class Proxy:
    """Passes bytes on, both ways, over loopback; faults are attributes that tests set.

    Attributes:
      to: port of whom connections are passed on to.
      delay: seconds one way.
      loss: share of pieces that come `RESENT` later.
      damage: share of pieces of which a bit is another.
      bytes: passed on so far.
    """

    def __init__(self, to: int, *, seed: int = 0) -> None:
        self.to, self.delay, self.loss, self.damage = to, 0.0, 0.0, 0.0
        self.bytes = 0
        self._open = threading.Event()
        self._open.set()
        self._abandoned: list[threading.Event] = []
        self._random = random.Random(seed)
        self._ends: list[socket.socket] = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    @contextlib.contextmanager
    def parted(self):
        """Nothing comes through, and no end is told; afterwards all goes on."""
        self._open.clear()
        try:
            yield
        finally:
            self._open.set()

    def abandon(self) -> None:
        """Connections that there are stand still for ever; others come through."""
        self._open, abandoned = threading.Event(), self._open
        self._open.set()
        self._abandoned.append(abandoned)
        abandoned.clear()

    def cut(self) -> None:
        """Ends all connections that there are."""
        ends, self._ends = self._ends, []
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        """Ends all, and takes no connection more."""
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()
        for connection in (self._open, *self._abandoned):
            connection.set()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here, _ = self._server.accept()
                try:
                    there = socket.create_connection(("127.0.0.1", self.to))
                except OSError:  # nobody listens there
                    here.close()
                    continue
                self._ends += [here, there]
                for pair in ((here, there), (there, here)):
                    pair[0].setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        open_ = self._open
        with contextlib.suppress(OSError):
            while data := source.recv(2**16):
                lost = self._random.random() < self.loss
                time.sleep(self.delay + RESENT * lost)
                open_.wait()
                sink.sendall(self._damaged(data))
                self.bytes += len(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def _damaged(self, data: bytes) -> bytes:
        broken = bytearray(data)
        if self._random.random() < self.damage:
            broken[self._random.randrange(len(broken))] ^= 1 << self._random.randrange(8)
        return bytes(broken)
