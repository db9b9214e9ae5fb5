"""Where a worker listens: a socket without a name, or a port of the loopback interface."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import weakref

import grpc


def listen(server: grpc.Server) -> str:
    """Makes a server listen where only this host, on Linux only this user, can reach it.

    Returns: the address, for a channel of another process.
    """
    if sys.platform == "linux":
        with contextlib.suppress(OSError, RuntimeError):  # no /proc, or no directory to write to
            return _unnamed(server)
    return f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"


def _unnamed(server: grpc.Server) -> str:
    """A Unix socket whose name is gone at once, so that no end of any process leaves a file.

    Its address is the worker's open file in /proc, which is as private as the process itself. The
    name is relative to an open directory, since that of a socket must be shorter than some are.
    """
    directory = tempfile.mkdtemp(prefix="ssd-jax-")
    try:
        inside = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            server.add_insecure_port(f"unix:/proc/self/fd/{inside}/draft")
            socket = os.open("draft", os.O_PATH, dir_fd=inside)
        finally:
            os.close(inside)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    weakref.finalize(server, os.close, socket)
    return f"unix:/proc/{os.getpid()}/fd/{socket}"
