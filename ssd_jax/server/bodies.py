"""Bodies of requests: how large they may be, and the JSON in them."""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Send

from ssd_jax.server.errors import ApiError, invalid

_SECONDS = 30.0  # that a body may take to arrive
_REST_SECONDS = 5.0  # that the rest of a refused body is read for


async def read_body(request: Request, limit: int) -> bytes:
    """A body of at most `limit` bytes.

    Raises:
      ApiError: a longer one, or one that does not arrive.
      ClientDisconnect: the client left.
    """
    too_large = ApiError(
        413,
        f"the body has more than {limit} bytes, the limit of this server; send less",
        code="request_too_large",
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared[:20]) > limit:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_SECONDS):
            async for chunk in request.stream():
                size += len(chunk)
                if size > limit:
                    raise too_large
                chunks.append(chunk)
    except TimeoutError:
        raise ApiError(408, f"the body did not arrive within {_SECONDS:g} seconds") from None
    return b"".join(chunks)


async def refuse_body(request: Request, send: Send, response: Response) -> None:
    """Sends the response to a request whose body is not read, and closes the connection.

    The rest of the body is read for a while, and dropped: a client that still sends when its
    connection is closed might never see the response.
    """
    headers = [*response.raw_headers, (b"connection", b"close")]
    await send({"type": "http.response.start", "status": response.status_code, "headers": headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    with contextlib.suppress(TimeoutError, ClientDisconnect):
        async with asyncio.timeout(_REST_SECONDS):
            async for _ in request.stream():
                pass
    await send({"type": "http.response.body", "body": b""})


def json_object(body: bytes) -> dict[str, Any]:
    """The JSON object that a body is.

    Raises:
      ApiError: something else.
    """
    try:
        value = msgspec.json.decode(body)
    except RecursionError:
        raise invalid("the body nests too deeply; send less nested JSON", code=None) from None
    except msgspec.MsgspecError as error:
        raise invalid(f"the body is no JSON in UTF-8: {error}", code=None) from None
    except UnicodeDecodeError as error:
        raise invalid(f"the body is no JSON in UTF-8: {error.reason}", code=None) from None
    if not isinstance(value, dict):
        raise invalid("the body must be a JSON object", code=None)
    return value


async def disconnected(request: Request) -> None:
    """Waits until the client of a request whose body was read leaves."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
