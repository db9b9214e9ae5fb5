"""Responses that are streams of server-sent events."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator

from pydantic import BaseModel
from starlette.types import Receive, Scope, Send

from ssd_jax.server.access_log import record_error
from ssd_jax.server.errors import ApiError

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),  # of proxies
]
_ESCAPES = {"\x85": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"}
"""Of characters that JSON may have as they are and that end no line of a stream, but do where a
client splits its text as `str.splitlines` does, such as httpx's `iter_lines`."""


def as_json(value: BaseModel) -> str:
    """The JSON of a response or a chunk, with the fields that were set."""
    return value.model_dump_json(exclude_unset=True, warnings=False)


class EventStream:
    """The ASGI application that sends a stream of chunks.

    An error that comes after the first bytes is an event of its own, as OpenAI's clients expect.
    """

    def __init__(self, chunks: AsyncGenerator[BaseModel]) -> None:
        self._chunks = chunks

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends all chunks."""
        del scope, receive
        await send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        async with contextlib.aclosing(self._chunks) as chunks:
            try:
                async for chunk in chunks:
                    await _send(send, as_json(chunk))
            except ApiError as error:
                record_error(error.code or error.message)
                await _send(send, as_json(error.body))
        await _send(send, "[DONE]")
        await send({"type": "http.response.body", "body": b""})


async def _send(send: Send, data: str) -> None:
    for character, escape in _ESCAPES.items():
        data = data.replace(character, escape)
    body = f"data: {data}\n\n".encode()
    await send({"type": "http.response.body", "body": body, "more_body": True})
