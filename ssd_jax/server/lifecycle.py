"""A server from its socket to its end."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import threading
import time

import uvicorn

from ssd_jax.errors import InputError, SsdError
from ssd_jax.server.app import make_app
from ssd_jax.server.connections import HttpProtocol
from ssd_jax.server.state import ServerState

_CLOSE_SECONDS = 5  # that clients have to take the ends of their responses
STALL_SECONDS = 60
"""After which a connection whose client takes nothing of what is sent is closed, as if it had left:
until then what was decoded for it waits in memory, the text of a request at most."""


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens there; port 0 is any free one.

    Raises:
      InputError: the port is taken, or this machine has no such address.
    """
    where = f"host = {host!r}, port = {port}"
    try:
        family, *_, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{where}: the port is in use; give another `port`") from None
        reason = error.strerror or error
        raise InputError(f"{where}: {reason}; give an address of this machine") from None
    # Connections inherit it. Without it the body of a response waits 40 ms for the client to
    # acknowledge the headers; asyncio sets it only where a socket names its protocol.
    listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    close_stalled(listener, STALL_SECONDS)
    return listener


def close_stalled(listener: socket.socket, seconds: float) -> None:
    """Has connections closed whose clients take nothing for so long; Linux alone can do that."""
    if hasattr(socket, "TCP_USER_TIMEOUT"):
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(1000 * seconds))


class HttpServer:
    """Serves in a thread of its own.

    Args:
      listener: a socket that listens.
    """

    def __init__(self, state: ServerState, listener: socket.socket) -> None:
        self._state, self._listener = state, listener
        tls = state.options.tls
        config = uvicorn.Config(
            make_app(state),
            http=HttpProtocol,  # whatever else is installed
            ws="none",
            log_config=None,
            log_level=logging.ERROR,  # each client's mistake is a warning
            access_log=False,
            lifespan="off",
            timeout_graceful_shutdown=_CLOSE_SECONDS,
            server_header=False,
            ssl_context_factory=None if tls is None else lambda *_: tls,
        )
        self._server = uvicorn.Server(config)
        state.connections = lambda: len(self._server.server_state.connections)
        self._thread = threading.Thread(target=self._run, name="ssd_jax http", daemon=True)

    @property
    def port(self) -> int:
        """Where it listens."""
        return self._listener.getsockname()[1]

    @property
    def scheme(self) -> str:
        """Of its addresses."""
        return "http" if self._state.options.tls is None else "https"

    def start(self) -> None:
        """Answers from now on.

        Raises:
          SsdError: the server cannot start.
        """
        self._thread.start()
        while not self._server.started:
            if not self._thread.is_alive():
                raise SsdError("the HTTP server cannot start")
            time.sleep(0.005)

    def _run(self) -> None:
        asyncio.run(self._server.serve(sockets=[self._listener]))

    def drain(self, seconds: float) -> bool:
        """Takes no more requests and waits for those that run; returns whether all have ended."""
        self._state.draining = True
        end = time.monotonic() + seconds
        while self._state.admission.texts and time.monotonic() < end:
            time.sleep(0.02)
        return not self._state.admission.texts

    def stop(self) -> None:
        """Closes all connections once what was answered is sent, and ends the thread."""
        self._server.should_exit = True
        self._thread.join(_CLOSE_SECONDS + 2)
