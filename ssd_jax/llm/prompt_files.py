"""Prompt files: one JSON object a line; all lines are checked, and bad ones are kept, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.system.files import parse_json, read_lines

PROMPT_KEYS = ("prompt", "prompt_token_ids", "messages")
"""Keys of which a prompt has one."""

CHAT_KEYS = (
    *("tools", "chat_template", "chat_template_kwargs"),
    *("add_generation_prompt", "continue_final_message"),
)
"""Keys beside "messages" that say how a chat template takes them."""

ROW_KEYS = ("id", "custom_id", "task_id", "question_id", "category")
"""Keys that say which prompt a line is."""

_OF_CHAT = "stopped"
"""Key with which `ssd-jax chat` marks answers that were cut off; no template is meant to see it."""

_MOST_BAD_LINES = 1000
_REMEDY = "give a file of JSON lines in UTF-8"

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A usable prompt: exactly one of `prompt`, `token_ids` and `messages` is given.

    Attributes:
      prompt: plain text.
      token_ids: token ids.
      messages: chat messages with all their keys; never empty.
      chat: what the line says on the messages' way through the chat template, such as `tools`.
      others: all other keys of the line.
    """

    prompt: str | None = None
    token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    chat: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def content(self) -> str | list[int] | list[dict[str, Any]] | dict[str, Any]:
        """The prompt as `LLM.generate` takes it."""
        if self.messages is not None:
            return {"messages": self.messages, **self.chat} if self.chat else self.messages
        return (self.prompt or "") if self.token_ids is None else self.token_ids


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is not a prompt: `where` is 'file:line' (from 1), `error` is what is wrong."""

    where: str
    error: str


def read_json_lines(
    path: Path, parse: Callable[[Mapping[str, Any]], T], *, stream: BinaryIO | None = None
) -> list[T | BadLine]:
    """Reads the JSON objects of a file (gzip if its name ends in .gz), one a line.

    Args:
      parse: turns an object into a value; a ValueError makes a bad line with its message.
      stream: is read in place of the file; `path` is then its name in messages.

    Returns: one entry for each non-blank line, in order.

    Raises:
      InputError: the file cannot be read, is not UTF-8 text, or has too many or too long lines, or
        too many bad ones.
    """
    lines: list[T | BadLine] = []
    bad = 0
    for number, line in read_lines(path, remedy=_REMEDY, stream=stream):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            if not isinstance(value, dict):
                raise ValueError(f"must be a JSON object, not {_kind(value)}")
            lines.append(parse(value))
            continue
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error.msg} at column {error.colno}"
        except ValueError as error:
            problem = str(error)
        lines.append(BadLine(where=f"{path}:{number}", error=problem))
        bad += 1
        if bad > _MOST_BAD_LINES:
            raise InputError(
                f"{path} has more than {_MOST_BAD_LINES} bad lines, the last is line {number}: "
                f"{problem}; give JSON lines"
            )
    return lines


def good_lines(read: Iterable[Sequence[T | BadLine]]) -> list[list[T]]:
    """The values read from several files, if no line is bad.

    Raises:
      InputError: some lines are bad; the message lists those of all files.
    """
    files = list(read)
    bad = {line for lines in files for line in lines if isinstance(line, BadLine)}

    def location(line: BadLine) -> tuple[str, int]:
        path, _, number = line.where.rpartition(":")
        return path, int(number)

    if bad:
        problems = "\n".join(f"  {line.where}: {line.error}" for line in sorted(bad, key=location))
        raise InputError(f"{len(bad)} bad line(s) in the prompt files; mend these:\n{problems}")
    return [[line for line in lines if not isinstance(line, BadLine)] for lines in files]


def prompt_line(line: Mapping[str, Any]) -> PromptLine:
    """Checks one object of a prompt file, with {"prompt": str}, {"prompt_token_ids": [int]} or
    {"messages": [...]}.

    Raises:
      ValueError: it has none or several of these keys, or a value of a wrong type.
    """
    keys = [key for key in PROMPT_KEYS if key in line]
    if len(keys) != 1:
        described = " and ".join(f'"{key}"' for key in keys) or f"none, but {_names(line)}"
        raise ValueError(
            f'needs one of "prompt", "prompt_token_ids" and "messages"; has {described}'
        )
    (key,) = keys
    value = line[key]
    chat = {name: line[name] for name in CHAT_KEYS if name in line}
    others = {name: line[name] for name in line if name != key and name not in chat}
    if chat and key != "messages":
        raise ValueError(f'"{next(iter(chat))}" is for "messages", not for "{key}"')
    if key == "prompt":
        return PromptLine(prompt=string(value, '"prompt"'), others=others)
    if not isinstance(value, list) or not value:
        raise ValueError(f'"{key}" must be a non-empty list, not {_kind(value)}')
    if key == "prompt_token_ids":
        if not all(type(token) is int for token in value):
            raise ValueError('"prompt_token_ids" must be a list of integers')
        return PromptLine(token_ids=value, others=others)
    messages = [_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    return PromptLine(messages=messages, chat=chat, others=others)


def message_text(message: Mapping[str, Any]) -> str:
    """The words of a message of a `PromptLine`, those of all its text parts."""
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return "\n".join(str(part.get("text", "")) for part in content)


def string(value: object, name: str) -> str:
    """`value`, checked to be text that can be encoded.

    Raises:
      ValueError: it is not a string, or has half of a surrogate pair in it.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a string, not {_kind(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f"{name} has an unpaired surrogate (\\u{ord(value[error.start]):04x}) "
            f"at character {error.start}"
        ) from None
    return value


def _message(item: object, name: str) -> dict[str, Any]:
    if not isinstance(item, dict):
        raise ValueError(f'{name} must be {{"role": ..., "content": ...}}, not {_kind(item)}')
    required = ("role",) if item.get("tool_calls") else ("role", "content")
    missing = [key for key in required if key not in item]
    if missing:
        raise ValueError(f'{name} has no "{missing[0]}"; it has {_names(item)}')
    string(item["role"], f'{name}["role"]')
    content = item.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        for index, part in enumerate(content):
            string(part.get("text", ""), f'{name}["content"][{index}]["text"]')
    elif content is not None or not item.get("tool_calls"):
        string(content, f'{name}["content"]')
    return {key: value for key, value in item.items() if key != _OF_CHAT}


def _kind(value: object) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string"}
    if value is None:
        return "null"
    if not value and isinstance(value, list | dict):
        return "an empty list" if isinstance(value, list) else "an empty object"
    return names.get(type(value), "a list" if isinstance(value, list) else "an object")


def _names(line: Mapping[str, Any]) -> str:
    shown = ", ".join(json.dumps(key[:40]) for key in list(line)[:5])
    return (shown + ", ..." if len(line) > 5 else shown) or "no keys"
