"""Requests with a body: read within limits, answered while the client stays."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ssd_jax.errors import InputError
from ssd_jax.server.access_log import record_error
from ssd_jax.server.bodies import disconnected, json_object, read_body, refuse_body
from ssd_jax.server.errors import ApiError, invalid, of_input
from ssd_jax.server.state import ServerState

_LOG = logging.getLogger(__name__)

Handler = Callable[[ServerState, dict[str, Any], contextlib.ExitStack], Awaitable[ASGIApp]]
"""Makes the response to a JSON object; the stack is closed once the response was sent."""


class Post:
    """The application of a route that takes a JSON object.

    A client that leaves cancels what it has asked for.
    """

    def __init__(self, state: ServerState, handle: Handler) -> None:
        self._state, self._handle = state, handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Reads the body and answers."""
        request = Request(scope, receive)
        try:
            body = await read_body(request, self._state.options.max_body)
        except ClientDisconnect:
            return
        except ApiError as error:
            await refuse_body(request, send, self._refused(error).response())
            return
        answering = asyncio.create_task(self._answer(body, scope, receive, send))
        leaving = asyncio.create_task(disconnected(request))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (answering, leaving):
                task.cancel()
            await asyncio.gather(answering, leaving, return_exceptions=True)

    async def _answer(self, body: bytes, scope: Scope, receive: Receive, send: Send) -> None:
        with contextlib.ExitStack() as stack:
            try:
                response = await self._handle(self._state, json_object(body), stack)
            except Exception as error:
                response = self._refusal(error).response()
            with contextlib.suppress(OSError):  # the client has left
                await response(scope, receive, send)

    def _refusal(self, error: Exception) -> ApiError:
        if isinstance(error, InputError):
            error = of_input(error, {})
        elif isinstance(error, RecursionError):
            error = invalid("the body nests too deeply; send less nested JSON", code=None)
        if not isinstance(error, ApiError):
            _LOG.error("a request failed", exc_info=error)
            error = ApiError(500, "the server has failed at this request; its log says more")
        return self._refused(error)

    def _refused(self, error: ApiError) -> ApiError:
        """The error, counted and logged."""
        self._state.metrics.note_refusal(error.status)
        record_error(error.code or error.message)
        return error
