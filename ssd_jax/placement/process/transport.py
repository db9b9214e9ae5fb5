"""What both ends of a stream agree on before its first message, and where a worker listens."""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import weakref

import grpc

from ssd_jax.placement.process.messages import Hello

METHOD = "/ssd_jax.Draft/Stream"
TOKEN = "ssd-token"
"""Key of a call's metadata: who does not know the secret under it gets no stream."""
LET_IN = ("ssd-let-in", "1")
"""What a worker answers to who does, at once."""
Options = tuple[tuple[str, int], ...]
_QUIET, _SILENT = 500, 1500  # milliseconds without a word until a ping, and until its answer is due
_CONNECTIONS = 128  # at a time; each engine has one
_IDLE = 10_000  # milliseconds that a connection lives without a stream
_METADATA = 4096  # bytes
_OTHERS = 2**16  # bytes of whatever is no array: an opening with its stop strings


def message_size(about: Hello) -> int:
    """Bytes that no message with a use has more of."""
    rows = about.slots * (about.context + 4 * (about.k + 4))
    branches = about.slots * about.branches * (2 * about.k + 2)
    q = 2 * about.slots * about.k * (about.support + 1)
    return min(2 * (_OTHERS + 4 * (rows + branches + q)), 2**31 - 1)


def options(size: int) -> Options:
    """Of a gRPC channel or server: no proxy, and no message of more bytes."""
    return (
        ("grpc.enable_http_proxy", 0),  # the way is known, whatever http_proxy says
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.max_metadata_size", _METADATA),
        ("grpc.absolute_max_metadata_size", _METADATA),
    )


def channel_options(about: Hello) -> Options:
    """Of an engine's channel: a worker that is stopped is found out by pings of the transport.

    Threads of gRPC answer them, however long the worker computes.
    """
    return (
        *options(message_size(about)),
        ("grpc.keepalive_time_ms", _QUIET),
        ("grpc.keepalive_timeout_ms", _SILENT),
        ("grpc.http2.ping_timeout_ms", _SILENT),  # the longer of the two counts
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.use_local_subchannel_pool", 1),  # or a new channel waits as its failed ones would
    )


def server_options(size: int) -> Options:
    """Of a worker's server: pings are welcome, and strangers have little room."""
    return (
        *options(size),
        ("grpc.so_reuseport", 0),  # or two workers may get one port
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),  # no limit
        ("grpc.max_concurrent_streams", 4),  # of a connection
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
        ("grpc.max_connection_idle_ms", _IDLE),
        ("grpc.server_handshake_timeout_ms", _IDLE),
    )


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
