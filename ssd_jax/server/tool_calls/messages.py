"""Tool calls in messages: those that clients send back, and those that responses have."""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.server.errors import invalid
from ssd_jax.server.tool_calls.protocols import Arguments, CallParser, Content, Delta, Reasoning
from ssd_jax.system.files import shown


def check_messages(messages: Sequence[Mapping[str, Any]], template: str | None) -> None:
    """Checks calls and results among messages.

    Raises:
      ApiError: a call without the function's name, a result that does not say of which call, or
        calls that the chat template would leave out.
    """
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if message.get("role") == "tool" and not isinstance(message.get("tool_call_id"), str):
            raise invalid(
                f"{where}.tool_call_id = {shown(message.get('tool_call_id'))}: give the id of the "
                "call whose result this is",
                "messages",
            )
        calls = message.get("tool_calls")
        if calls and not re.search(r"\btool_calls\b", template or "tool_calls"):
            raise invalid(
                f"{where}.tool_calls: the chat template of this model takes none; leave them out",
                "messages",
            )
        for number, call in enumerate(calls if isinstance(calls, list) else ()):
            function = call.get("function") if isinstance(call, Mapping) else None
            name = function.get("name") if isinstance(function, Mapping) else None
            if not isinstance(name, str):
                raise invalid(
                    f"{where}.tool_calls[{number}] has no function with a name; give "
                    '{"id": ..., "type": "function", "function": {"name": ..., "arguments": ...}}',
                    "messages",
                )


class CallWriter:
    """Writes one text as OpenAI's messages do, in one piece or as it grows."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser
        self._calls = 0

    @property
    def finish_reason(self) -> str:
        """Why a text that was not cut off has ended."""
        return "tool_calls" if self._calls else "stop"

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """What more text adds to a message, one `delta` a chunk."""
        deltas = self._parser.push(text)
        if is_last:
            deltas += self._parser.finish()
        return [*map(self._delta, deltas)]

    def _delta(self, delta: Delta) -> dict[str, Any]:
        if isinstance(delta, Content):
            return {"content": delta.text}
        if isinstance(delta, Reasoning):
            return {"reasoning_content": delta.text}
        if isinstance(delta, Arguments):
            call = {"index": self._calls - 1, "function": {"arguments": delta.text}}
            return {"tool_calls": [call]}
        function = {"name": delta.name, "arguments": ""}
        call = {"index": self._calls, "id": _new_id(), "type": "function", "function": function}
        self._calls += 1
        return {"tool_calls": [call]}

    def message(self, text: str) -> dict[str, Any]:
        """`content`, `reasoning_content` and `tool_calls` of a whole text; a content without words
        is null."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: list[dict[str, Any]] = []
        for delta in self.push(text, is_last=True):
            content.append(delta.get("content", ""))
            reasoning.append(delta.get("reasoning_content", ""))
            for call in delta.get("tool_calls", ()):
                if "id" in call:
                    calls.append({name: call[name] for name in ("id", "type", "function")})
                else:
                    calls[-1]["function"]["arguments"] += call["function"]["arguments"]
        message: dict[str, Any] = {"content": "".join(content) or None}
        if any(reasoning):
            message["reasoning_content"] = "".join(reasoning)
        return message | {"tool_calls": calls} if calls else message


def _new_id() -> str:
    return f"call_{secrets.token_hex(12)}"
