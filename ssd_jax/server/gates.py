"""What requests must pass before a route sees them: the limit of connections, then the key."""

from __future__ import annotations

import hashlib
import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_jax.server.access_log import PROBES, record_error
from ssd_jax.server.bodies import refuse_body
from ssd_jax.server.errors import ApiError
from ssd_jax.server.state import ServerState

OPEN = (*PROBES, "/")
"""Paths that need no key: the probes, and the status page, which holds no figures of its own."""
_RETRY = 1  # seconds


class KeyGate:
    """Lets requests pass that come with one of the server's keys, as `Authorization: Bearer KEY`.

    All keys are compared, and in a time that does not depend on where they differ.
    """

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state
        self._digests = [_digest(key.encode()) for key in state.options.keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with status 401, or passes the request on."""
        if scope["type"] != "http" or scope["path"] in OPEN or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        self._state.metrics.note_refusal(401)
        record_error("invalid_api_key")
        response = ApiError(
            401,
            "this server needs one of its API keys; send the header Authorization: Bearer KEY",
            code="invalid_api_key",
        ).response()
        response.headers["WWW-Authenticate"] = "Bearer"
        await refuse_body(Request(scope, receive), send, response)

    def _knows(self, headers: Headers) -> bool:
        kind, _, key = headers.get("authorization", "").partition(" ")
        digest = _digest(key.strip().encode("latin-1"))
        same = [hmac.compare_digest(digest, known) for known in self._digests]
        return kind.lower() == "bearer" and any(same)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


class ConnectionGate:
    """Refuses requests while more connections are open than the server may have."""

    def __init__(self, app: ASGIApp, state: ServerState, most: int) -> None:
        self._app, self._state, self._most = app, state, most

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers with status 503, or passes the request on, as it does with probes."""
        number = self._state.connections()
        if scope["type"] != "http" or scope["path"] in PROBES or number <= self._most:
            await self._app(scope, receive, send)
            return
        self._state.metrics.note_refusal(503)
        record_error("too_many_connections")
        response = ApiError(
            503,
            f"{number} connections are open, and this server takes {self._most}; try again later",
            code="too_many_connections",
            retry_after=_RETRY,
        ).response()
        await refuse_body(Request(scope, receive), send, response)
