"""Streams between hosts: gRPC, with its pings, limits and certificates."""

from __future__ import annotations

import contextlib
import functools
import hmac
import logging
import queue
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc

from ssd_jax.errors import InputError
from ssd_jax.wire.address import Address
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.stream import Answers, StreamError

METHOD = "/ssd_jax.Draft/Stream"
TOKEN = "ssd-token"
"""Key of a call's metadata that holds the secret, without which no stream is opened."""
LET_IN = ("ssd-let-in", "1")
"""What a worker answers at once to a call with the secret."""
Options = tuple[tuple[str, int], ...]
_QUIET, _SILENT = 500, 1500  # milliseconds of silence until a ping, and until its answer is due
_ENGINE_QUIET, _ENGINE_SILENT = 2000, 5000  # the same for an engine, whose seat others may want
_CONNECTIONS = 128  # at a time; each engine has one
_IDLE = 10_000  # milliseconds that a connection lives without a stream
_METADATA = 4096  # bytes


def _options(size: int, quiet: int, silent: int) -> Options:
    """Options of a gRPC channel or server: no proxy, the message limit, and when it pings."""
    return (
        ("grpc.enable_http_proxy", 0),  # the route is known, whatever http_proxy says
        ("grpc.max_receive_message_length", size),
        ("grpc.max_send_message_length", size),
        ("grpc.max_metadata_size", _METADATA),
        ("grpc.absolute_max_metadata_size", _METADATA),
        ("grpc.keepalive_time_ms", quiet),
        ("grpc.keepalive_timeout_ms", silent),
        ("grpc.http2.ping_timeout_ms", silent),  # the longer of the two counts
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),  # no limit
    )


def _channel_options(size: int) -> Options:
    """Options of an engine's channel, whose pings detect a stopped worker.

    gRPC's threads answer them, however long the worker computes.
    """
    return (
        *_options(size, _QUIET, _SILENT),
        ("grpc.use_local_subchannel_pool", 1),  # or a new channel would wait as failed ones do
    )


def _server_options(size: int) -> Options:
    """Options of a worker's server: it accepts pings, gives strangers little room, and frees the
    seat of an engine whose host has vanished."""
    return (
        *_options(size, _ENGINE_QUIET, _ENGINE_SILENT),
        ("grpc.so_reuseport", 0),  # or two workers may get one port
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),  # no limit
        ("grpc.max_concurrent_streams", 4),  # per connection
        ("grpc.max_allowed_incoming_connections", _CONNECTIONS),
        ("grpc.max_connection_idle_ms", _IDLE),
        ("grpc.server_handshake_timeout_ms", _IDLE),
    )


class FarStream:
    """See `stream.Stream`; gRPC's threads send.

    Args:
      credentials: credentials of the channel; None is plain text.
    """

    def __init__(
        self,
        address: str,
        token: str,
        size: int,
        *,
        credentials: grpc.ChannelCredentials | None = None,
    ) -> None:
        self.heard = False
        self._queued = self._left = 0  # messages; each is changed by one thread only
        self._changed = threading.Condition()
        self._ended = False
        self._outbox: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        options = _channel_options(size)
        if credentials is None:
            self._channel = grpc.insecure_channel(address, options=options)
        else:
            self._channel = grpc.secure_channel(address, credentials, options=options)
        stream = self._channel.stream_stream(METHOD)
        self._call = stream(self._leaving(), metadata=((TOKEN, token),), wait_for_ready=False)

    def send(self, data: bytes) -> None:
        """See `stream.Stream.send`; returns at once."""
        self._queued += 1
        self._outbox.put(data)

    def flush(self, timeout: float) -> bool:
        """See `stream.Stream.flush`: on busy cores, threads do not get a turn soon."""
        with self._changed:
            self._changed.wait_for(lambda: self._left == self._queued or self._ended, timeout)
            return self._left == self._queued

    def answers(self) -> Iterator[bytes]:
        """See `stream.Stream.answers`."""
        try:
            self.heard = LET_IN in self._call.initial_metadata()  # waits for it
            yield from self._call
        except grpc.RpcError as error:
            code = error.code().name if isinstance(error, grpc.Call) else repr(error)
            raise StreamError(code, refused=code == "UNIMPLEMENTED") from None

    def close(self) -> None:
        """See `stream.Stream.close`."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._outbox.put(None)
        self._call.cancel()
        self._channel.close()

    def _leaving(self) -> Iterator[bytes]:
        """Messages for gRPC, which asks for the next when it has sent one."""
        while (data := self._outbox.get()) is not None:
            yield data
            with self._changed:
                self._left += 1
                self._changed.notify_all()


def serve_far(
    answers: Answers,
    token: str,
    address: Address,
    credentials: grpc.ServerCredentials | None,
    *,
    size: int,
    streams: int,
    refusals: Refusals,
) -> tuple[grpc.Server, str]:
    """Starts a server of streams.

    Args:
      answers: answers the messages of a stream.
      token: secret that opening a stream requires.
      address: address to listen at.
      credentials: TLS credentials; None is plain text.
      size: most bytes of a message.
      streams: number of streams that have a thread; a few more have one to be refused by.
      refusals: logs who does not know the token.

    Returns: the server, which its `stop` ends, and where it listens.

    Raises:
      InputError: the address cannot be listened on.
    """
    logging.getLogger("grpc._cython.cygrpc").addFilter(functools.partial(_says_once, refusals))
    server = grpc.server(ThreadPoolExecutor(streams + 4), options=_server_options(size))

    def stream(requests: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        context.send_initial_metadata((LET_IN,))  # a sign of life, before there is a draft
        return answers(requests, lambda: not context.is_active())

    handler = _Handler(grpc.stream_stream_rpc_method_handler(stream), token, refusals)
    server.add_generic_rpc_handlers([handler])
    port = 0
    with contextlib.suppress(RuntimeError):
        if credentials is None:
            port = server.add_insecure_port(str(address))
        else:
            port = server.add_secure_port(str(address), credentials)
    if not port:
        raise InputError(
            f"listen = {str(address)!r} cannot be listened on: it is no address of this host, or "
            "another program has the port"
        )
    server.start()
    return server, str(address._replace(port=port))


def _says_once(refusals: Refusals, record: logging.LogRecord) -> bool:
    """Keeps gRPC's line for each stranger whose metadata are not text out of the log."""
    strange = str(record.msg).startswith("Invalid encoding")
    if strange:
        refusals.say("metadata", "its metadata are no text")
    return not strange


class _Handler(grpc.GenericRpcHandler):
    """Bytes in, bytes out, for callers with the token; others are not read and get no thread."""

    def __init__(self, handler: grpc.RpcMethodHandler, token: str, refusals: Refusals) -> None:
        self._handler, self._token, self._refusals = handler, token.encode(), refusals

    def service(
        self, handler_call_details: grpc.HandlerCallDetails
    ) -> grpc.RpcMethodHandler | None:
        """See `grpc.GenericRpcHandler.service`."""
        if handler_call_details.method != METHOD:
            return None
        told = [value for key, value in handler_call_details.invocation_metadata if key == TOKEN]
        known = len(told) == 1 and hmac.compare_digest(str(told[0]).encode(), self._token)
        if not known:
            self._refusals.say("token", "it does not know the token")
        return self._handler if known else None
