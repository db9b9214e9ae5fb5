"""Bodies of requests: how large they may be, and the JSON in them."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from starlette.requests import Request

from ssd_jax.server.errors import ApiError, invalid

_SECONDS = 30.0  # that a body may take to arrive


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
