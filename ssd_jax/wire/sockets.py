"""Sockets of both kinds of addresses: of this host alone, and HOST:PORT."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable
from typing import NamedTuple

_BACKLOG = 1024
_UNIX = "unix:"
_PAUSE = 0.01  # seconds before a listener that has no place for another is tried again


class Endpoint(NamedTuple):
    """A socket that listens.

    Attributes:
      address: for `connect`, as another process of this host may use it.
      file: names a Unix socket; -1 for none. Close it with the socket.
    """

    socket: socket.socket
    address: str
    file: int = -1


def listen(host: str, port: int) -> Endpoint:
    """Listens at an address of this machine; without `host` at all of them, IPv6 and IPv4.

    Raises:
      OSError: the address cannot be had.
    """
    is_dual_stack = not host and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual_stack else socket.AF_INET
    if host:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
    listener = socket.create_server(
        (host, port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual_stack
    )
    host_text = f"[{host}]" if ":" in host else host
    return Endpoint(listener, f"{host_text}:{listener.getsockname()[1]}")


def listen_locally() -> Endpoint:
    """Listens for processes of this host: on Linux for those of this user alone."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # no /proc, or no directory to write to
            return _unnamed_unix_socket()
    return listen("127.0.0.1", 0)


def _unnamed_unix_socket() -> Endpoint:
    """A Unix socket whose name is removed at once, so that no file is left however a process ends.

    Its address is the process's open file in /proc, which is as private as the process itself. The
    name is relative to an open directory, since some paths are too long for a socket's name.
    """
    directory = tempfile.mkdtemp(prefix="ssd-jax-")
    listener = socket.socket(socket.AF_UNIX)
    try:
        directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            listener.bind(f"/proc/self/fd/{directory_fd}/draft")
            listener.listen(_BACKLOG)
            file = os.open("draft", os.O_PATH, dir_fd=directory_fd)
        finally:
            os.close(directory_fd)
    except BaseException:
        listener.close()
        raise
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return Endpoint(listener, f"{_UNIX}/proc/{os.getpid()}/fd/{file}", file)


def host_of(address: str) -> str:
    """The host of an address HOST:PORT."""
    return address.rpartition(":")[0].strip("[]")


def connect(
    address: str, seconds: float, on_socket: Callable[[socket.socket], None] = lambda _: None
) -> socket.socket:
    """Connects to an address.

    Args:
      seconds: how long to try each address of a host.
      on_socket: is called with each socket before it is connected; shutting it down ends the
        wait.

    Raises:
      OSError: nobody listens there.
    """
    if address.startswith(_UNIX):
        return _connect_locally(address.removeprefix(_UNIX), seconds, on_socket)
    port = int(address.rpartition(":")[2])
    error: OSError | None = None
    for family, kind, protocol, _, remote in socket.getaddrinfo(
        host_of(address), port, type=socket.SOCK_STREAM
    ):
        connecting = socket.socket(family, kind, protocol)
        try:
            on_socket(connecting)
            connecting.settimeout(seconds)
            connecting.connect(remote)
            return connecting
        except OSError as failure:
            connecting.close()
            error = failure
    raise error or OSError(f"{address} is no address")


def _connect_locally(
    path: str, seconds: float, on_socket: Callable[[socket.socket], None]
) -> socket.socket:
    connecting, deadline = socket.socket(socket.AF_UNIX), time.monotonic() + seconds
    try:
        on_socket(connecting)
        connecting.setblocking(False)
        while True:
            try:
                connecting.connect(path)
                return connecting
            except BlockingIOError:  # others wait to be accepted, and there is no place
                if time.monotonic() > deadline:
                    raise
                time.sleep(_PAUSE)
    except BaseException:
        connecting.close()
        raise
