"""Servers of streams of each kind in this process, engines of theirs, and strangers."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ssd_jax.wire import handshake
from ssd_jax.wire.frames import with_length
from ssd_jax.wire.listener import Limits
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.security import Files
from ssd_jax.wire.sockets import connect, listen, listen_locally
from ssd_jax.wire.stream import ServeStream, Stream, StreamServer

KINDS = ("here", "port", "tls")
TOKEN = "0123456789abcdef"
SIZE = 2**20


def echo(messages: Iterator[bytes]) -> Iterator[bytes]:
    """Answers each message by itself, backwards."""
    return (message[::-1] for message in messages)


def certificates(folder: Path) -> dict[str, str]:
    """Paths: two authorities, and certificates of both ends and of a stranger."""
    trustme = pytest.importorskip("trustme")
    found = {}
    trusted, stranger = trustme.CA(), trustme.CA()
    for name, authority in (("ca", trusted), ("other", stranger)):
        authority.cert_pem.write_to_path(str(folder / name))
        found[name] = str(folder / name)
    for end, authority, host in (
        ("worker", trusted, "127.0.0.1"),
        ("elsewhere", trusted, "worker.example"),
        ("engine", trusted, "127.0.0.1"),
        ("stranger", stranger, "127.0.0.1"),
    ):
        made = authority.issue_cert(host)
        made.private_key_pem.write_to_path(str(folder / f"{end}.key"))
        made.cert_chain_pems[0].write_to_path(str(folder / f"{end}.cert"))
        found |= {f"{end}.{kind}": str(folder / f"{end}.{kind}") for kind in ("key", "cert")}
    return found


class Server(NamedTuple):
    """A server of streams.

    Attributes:
      open: opens a stream as an engine, with a token.
    """

    address: str
    open: Callable[[str], Stream]

    def asks(self, question: bytes = b"abc", token: str = TOKEN) -> bytes:
        """What the server answers to a new stream's question."""
        stream = self.open(token)
        stream.send(question)
        try:
            return next(stream.answers())
        finally:
            stream.close()

    def stranger(self) -> socket.socket:
        """A connection to the server; what is said over it is up to the caller."""
        connected = connect(self.address, 60)
        connected.settimeout(60)
        return connected


@contextlib.contextmanager
def serving(
    kind: str = "port",
    answers: ServeStream = echo,
    *,
    files: dict[str, str] | None = None,
    silence: float | None = None,
    limits: Limits = Limits(),  # noqa: B008 (immutable)
) -> Iterator[Server]:
    """A server of a kind of `KINDS`; for "tls" with the `certificates`."""
    of_worker = of_engine = None
    if kind == "tls":
        assert files is not None
        pair = {"cert": files["worker.cert"], "key": files["worker.key"]}
        of_worker = Files(**pair).serving_context()
        of_engine = Files(ca=files["ca"]).engine_context()
    server = StreamServer(
        answers,
        listen_locally() if kind == "here" else listen("127.0.0.1", 0),
        TOKEN,
        SIZE,
        Refusals(),
        silence=silence,
        tls=of_worker,
        limits=limits,
    )
    try:
        yield Server(
            server.address, lambda token: Stream(server.address, token, SIZE, tls=of_engine)
        )
    finally:
        server.stop()


def ended(connected: socket.socket, seconds: float = 60.0) -> bool:
    """Whether the other end closes a connection within some time."""
    end = time.monotonic() + seconds
    try:
        while (left := end - time.monotonic()) > 0:
            connected.settimeout(left)
            if not connected.recv(4096):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True
    return False


def answer(hello: bytes, *, version: int = handshake.VERSION, token: str = TOKEN) -> bytes:
    """What an engine of some version answers to a server's hello."""
    greeting = b"SSD" + bytes([version]) + b"\5" * 32
    return with_length(greeting + handshake._proof(token.encode(), b"client", hello + greeting))


def frame_of(connected: socket.socket) -> bytes:
    """The next frame."""
    length = int.from_bytes(_exactly(connected, 4), "little")
    return _exactly(connected, length)


def _exactly(connected: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        part = connected.recv(count - len(data))
        if not part:
            raise ConnectionError
        data += part
    return data


class Crowd:
    """Strangers that say nothing, and come again when they are cut."""

    def __init__(self, server: Server, count: int) -> None:
        self.cut = 0
        self._server, self._count = server, count
        self._connected: list[socket.socket] = []
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, daemon=True)

    def __enter__(self) -> Crowd:
        self._thread.start()
        while len(self._connected) < self._count:
            time.sleep(0.01)
        return self

    def __exit__(self, *_: object) -> None:
        self._closed.set()
        self._thread.join()
        for connection in self._connected:
            connection.close()

    def _renew(self) -> None:
        while not self._closed.is_set():
            alive = []
            for connection in self._connected:
                if _is_cut(connection):
                    connection.close()
                    self.cut += 1
                else:
                    alive.append(connection)
            self._connected = alive
            with contextlib.suppress(OSError):
                while len(alive) < self._count:
                    alive.append(self._server.stranger())
            time.sleep(0.005)


def _is_cut(connected: socket.socket) -> bool:
    connected.setblocking(False)
    try:
        return not connected.recv(4096)
    except BlockingIOError:
        return False
    except OSError:
        return True
