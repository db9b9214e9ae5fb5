"""The access log: a line of JSON for each request."""

from __future__ import annotations

import contextvars
import dataclasses
import datetime
import logging
import logging.handlers
import sys
import time
from collections.abc import Callable
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ssd_jax.server.options import STANDARD_OUTPUT

CLIENT_LEFT = 499
"""Status of a request whose client left before there was a response, as nginx has it."""
PROBES = ("/health", "/health/live", "/health/ready")
"""Paths that tell an orchestrator how the server is."""
_POLLED = (*PROBES, "/metrics", "/status.json")
"""Paths that are asked all the time; only their failures are logged."""


@dataclasses.dataclass
class AccessRecord:
    """What a request says of itself.

    Attributes:
      facts: gives the facts of its answer once that has ended; called with whether to include
        prompts and texts.
      error: code or message of the refusal.
    """

    facts: Callable[[bool], dict[str, Any]] | None = None
    error: str | None = None


_RECORD: contextvars.ContextVar[AccessRecord | None] = contextvars.ContextVar(
    "record", default=None
)


def record_facts(facts: Callable[[bool], dict[str, Any]]) -> None:
    """Sets `AccessRecord.facts` of the request that is answered."""
    if (record := _RECORD.get()) is not None:
        record.facts = facts


def record_error(error: str) -> None:
    """Sets `AccessRecord.error` of the request that is answered."""
    if (record := _RECORD.get()) is not None:
        record.error = error


def open_log(target: str) -> logging.Handler:
    """Where lines are written: a file, which may be moved away meanwhile, or standard output."""
    handler = (
        logging.StreamHandler(sys.stdout)
        if target == STANDARD_OUTPUT
        else logging.handlers.WatchedFileHandler(target, encoding="utf-8")
    )
    handler.setFormatter(logging.Formatter("%(message)s"))
    return handler


class AccessLog:
    """Writes a line when a request has ended.

    Args:
      handler: takes the lines; see `open_log`.
      texts: whether lines have prompts and texts.
    """

    def __init__(self, app: ASGIApp, handler: logging.Handler, *, texts: bool) -> None:
        self._app, self._handler, self._texts = app, handler, texts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, then writes."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        status = CLIENT_LEFT

        async def note(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        record, started = AccessRecord(), time.monotonic()
        _RECORD.set(record)  # each request is a task of its own
        try:
            await self._app(scope, receive, note)
        finally:
            if status >= 400 or scope["path"] not in _POLLED:
                self._write(scope, record, status, time.monotonic() - started)

    def _write(self, scope: Scope, record: AccessRecord, status: int, seconds: float) -> None:
        client = scope.get("client")
        line = {
            "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds"),
            "client": client[0] if client else None,
            "method": scope["method"],
            "path": scope["path"],
            "status": status,
            "seconds": round(seconds, 6),
        }
        if record.error is not None:
            line["error"] = record.error
        if record.facts is not None:
            line |= record.facts(self._texts)
        text = msgspec.json.encode(line).decode()
        self._handler.handle(logging.LogRecord("", logging.INFO, "", 0, text, None, None))
