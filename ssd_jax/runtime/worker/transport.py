"""What both ends of a stream agree on before its first message."""

from __future__ import annotations

from ssd_jax.runtime.worker.messages import Hello

METHOD = "/ssd_jax.Draft/Stream"


def options(about: Hello) -> tuple[tuple[str, int], ...]:
    """Of a gRPC channel or server: no proxy, and no message larger than any that has a use."""
    size = _largest(about)
    return (
        ("grpc.enable_http_proxy", 0),  # both ends are on this host, whatever http_proxy says
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
    )


def _largest(about: Hello) -> int:
    """Bytes, with room to spare: a number in a header takes at most 9, one in an array 4."""
    header = 2**16 + 16 * about.tokens  # biases of all tokens
    moves = 16 * about.slots * (about.context + 4 * (about.k + 1))
    branches = 4 * about.slots * about.branches * (about.k + 2)
    q = 8 * about.slots * about.k * (about.support + 1)
    return min(2 * (header + moves + branches + q), 2**31 - 1)
