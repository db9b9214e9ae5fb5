"""Chat messages and tools, checked and in the form that chat templates are written for.

Callers give OpenAI's form. Templates, which are written for transformers, want text as content and
a tool call's arguments as an object; vLLM changes messages in the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.system.files import nearest, shown

ROLES = ("system", "developer", "user", "assistant", "tool")
"""Roles of the OpenAI interface; a template may know others, which it then names."""

_FORM = "with the strings 'role' and 'content'"


def checked_messages(messages: object, template: str) -> list[dict[str, Any]]:
    """Messages for a template with this source.

    Text parts of a content are joined by newlines, the content null of a message with tool calls
    becomes empty, arguments of tool calls become objects, and keys that are null, or an empty list
    of tool calls, are left out. Reasoning also gets the key that gpt-oss's template has for it. All
    other keys stay as they are.

    Raises:
      InputError: no list of messages, a role that neither OpenAI's interface nor the template
        knows, or a content that is not text.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InputError(
            f"messages must be a non-empty list of objects {_FORM}, not {shown(messages)}"
        )
    return [_message(item, f"messages[{i}]", template) for i, item in enumerate(messages)]


def _message(message: object, where: str, template: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InputError(f"{where} must be an object {_FORM}, not {shown(message)}")
    role = message.get("role")
    if not isinstance(role, str):
        role_text = shown(role) if "role" in message else "missing"
        raise InputError(f"{where}: 'role' must be a string; it is {role_text}")
    if role not in ROLES and not any(f"{quote}{role}{quote}" in template for quote in "'\""):
        near = nearest(role.lower(), ROLES)
        hint = f"did you mean {near!r}?" if near else f"use {', '.join(ROLES)}"
        raise InputError(f"{where}: the role {shown(role)} is unknown; {hint}")
    fields = {key: value for key, value in message.items() if value is not None}
    if fields.get("tool_calls") == []:
        del fields["tool_calls"]
    fields["content"] = _content(message, where)
    if "reasoning_content" in fields and "message.thinking" in template:
        fields.setdefault("thinking", fields["reasoning_content"])  # gpt-oss's name of it
    if "tool_calls" in fields:
        fields["tool_calls"] = _tool_calls(fields["tool_calls"], where)
    return fields


def _content(message: Mapping[str, Any], where: str) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if content is None and message.get("tool_calls"):
        return ""
    if isinstance(content, list | tuple):
        return "\n".join(_text(part, f"{where}: content[{i}]") for i, part in enumerate(content))
    content_text = shown(content) if "content" in message else "missing"
    raise InputError(
        f"{where}: 'content' must be a string, or a list of parts of type 'text'; it is "
        f"{content_text}"
    )


def _text(part: object, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if not isinstance(part, Mapping) or not isinstance(kind, str):
        raise InputError(f"{where} must be {{'type': 'text', 'text': ...}}, not {shown(part)}")
    if kind != "text":
        raise InputError(f"{where} is of type {shown(kind)}; only parts of type 'text' are read")
    text = part.get("text")
    if not isinstance(text, str):
        raise InputError(f"{where}: 'text' must be a string; it is {shown(text)}")
    return text


def _tool_calls(calls: object, where: str) -> list[Any]:
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise InputError(f"{where}: 'tool_calls' must be a list of objects, not {shown(calls)}")
    return [_tool_call(call, f"{where}: tool_calls[{i}]") for i, call in enumerate(calls)]


def _tool_call(call: Mapping[str, Any], where: str) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping):
        return dict(call)
    arguments = function.get("arguments")
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
        if not isinstance(arguments, dict):
            raise InputError(
                f"{where}: 'arguments' must be an object or the JSON text of one; it is "
                f"{shown(function['arguments'])}"
            )
        function = {**function, "arguments": arguments}
    return {**call, "function": function}


def checked_tools(tools: object, template: str, model: str) -> list[Any] | None:
    """Tools for a template with this source; None without any.

    Raises:
      InputError: no list of objects, or a template that would leave them out.
    """
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise InputError(
            f"tools must be a list of objects, the JSON schemas of functions, not {shown(tools)}"
        )
    if not tools:
        return None
    require_named("tools", template, model)
    return list(tools)


def checked_variables(variables: object) -> dict[str, Any]:
    """Further variables of a template, such as enable_thinking.

    Raises:
      InputError: no object, or a name that has its own argument.
    """
    if not isinstance(variables, Mapping):
        raise InputError(f"chat_template_kwargs = {shown(variables)}: give an object of variables")
    for name in variables:
        if name in ("messages", "tools", "add_generation_prompt", "continue_final_message"):
            raise InputError(f"chat_template_kwargs: give {name} as an argument of its own")
    return dict(variables)


def require_named(name: object, template: str, model: str) -> None:
    """Refuses a variable that a template with this source would leave out.

    Raises:
      InputError: the template does not name it.
    """
    named = isinstance(name, str) and name in template
    if not named or not re.search(rf"\b{re.escape(str(name))}\b", template):
        raise InputError(
            f"the chat template of {model} takes no {shown(name)}; leave it out, or give another "
            "chat_template"
        )
