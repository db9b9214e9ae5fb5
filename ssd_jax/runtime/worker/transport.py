"""What both ends of a stream agree on before its first message."""

from __future__ import annotations

from ssd_jax.runtime.worker.messages import Hello

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


def options(about: Hello) -> Options:
    """Of a gRPC channel or server: no proxy, and no message larger than any that has a use."""
    size = _largest(about)
    return (
        ("grpc.enable_http_proxy", 0),  # both ends are on this host, whatever http_proxy says
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
        *options(about),
        ("grpc.keepalive_time_ms", _QUIET),
        ("grpc.keepalive_timeout_ms", _SILENT),
        ("grpc.http2.ping_timeout_ms", _SILENT),  # the longer of the two counts
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
        ("grpc.use_local_subchannel_pool", 1),  # or a new channel waits as its failed ones would
    )


def server_options(about: Hello) -> Options:
    """Of a worker's server: pings are welcome, and strangers have little room."""
    return (
        *options(about),
        ("grpc.so_reuseport", 0),  # or two workers may get one port
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),  # no limit
        ("grpc.max_concurrent_streams", 4),  # of a connection
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
        ("grpc.max_connection_idle_ms", _IDLE),
        ("grpc.server_handshake_timeout_ms", _IDLE),
    )


def _largest(about: Hello) -> int:
    """Bytes, with room to spare: a number in a header takes at most 9, one in an array 4."""
    header = 2**16 + 16 * about.tokens  # biases of all tokens
    moves = 16 * about.slots * (about.context + 4 * (about.k + 1))
    branches = 4 * about.slots * about.branches * (about.k + 2)
    q = 8 * about.slots * about.k * (about.support + 1)
    return min(2 * (header + moves + branches + q), 2**31 - 1)
