"""Prompt files: one JSON object a line; all lines are checked, and bad ones are kept, too."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.system.files import parse_json, read_lines

_MOST_BAD_LINES = 1000

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptLine:
    """A usable prompt: exactly one of `prompt` and `messages` is given.

    Attributes:
      prompt: plain text.
      messages: chat messages, each {"role": str, "content": str}; never empty.
    """

    prompt: str | None = None
    messages: list[dict[str, str]] | None = None

    @property
    def content(self) -> str | list[dict[str, str]]:
        """The text or the messages."""
        return self.messages or self.prompt or ""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BadLine:
    """A line that is not a prompt: `where` is 'file:line' (from 1), `error` is what is wrong."""

    where: str
    error: str


def read_json_lines(path: Path, parse: Callable[[Mapping[str, Any]], T]) -> list[T | BadLine]:
    """Reads the JSON objects of a file (gzip if its name ends in .gz), one a line.

    Args:
      parse: turns an object into a value; a ValueError makes a bad line with its message.

    Returns: one entry for each non-blank line, in order.

    Raises:
      InputError: the file cannot be read, is not UTF-8 text, or has too many or too long lines, or
        too many bad ones.
    """
    found: list[T | BadLine] = []
    bad = 0
    for number, line in read_lines(path, remedy="give a file of JSON lines in UTF-8"):
        if not line.strip():
            continue
        try:
            value = parse_json(line)
            if not isinstance(value, dict):
                raise ValueError(f"must be a JSON object, not {_kind(value)}")
            found.append(parse(value))
            continue
        except json.JSONDecodeError as error:
            problem = f"not JSON: {error.msg} at column {error.colno}"
        except ValueError as error:
            problem = str(error)
        found.append(BadLine(where=f"{path}:{number}", error=problem))
        bad += 1
        if bad > _MOST_BAD_LINES:
            raise InputError(
                f"{path} has more than {_MOST_BAD_LINES} bad lines, the last is line {number}: "
                f"{problem}; give JSON lines"
            )
    return found


def good_lines(read: Iterable[Sequence[T | BadLine]]) -> list[list[T]]:
    """The values read from several files, if no line is bad.

    Raises:
      InputError: some lines are bad; the message lists those of all files.
    """
    files = list(read)
    bad = {line for lines in files for line in lines if isinstance(line, BadLine)}

    def place(line: BadLine) -> tuple[str, int]:
        path, _, number = line.where.rpartition(":")
        return path, int(number)

    if bad:
        listed = "\n".join(f"  {line.where}: {line.error}" for line in sorted(bad, key=place))
        raise InputError(f"{len(bad)} bad line(s) in the prompt files; mend these:\n{listed}")
    return [[line for line in lines if not isinstance(line, BadLine)] for lines in files]


def prompt_line(line: Mapping[str, Any]) -> PromptLine:
    """Checks one object of a prompt file, {"prompt": str} or {"messages": [...]}; other keys are
    ignored.

    Raises:
      ValueError: it has neither or both of "prompt" and "messages", or one of a wrong type.
    """
    if ("prompt" in line) == ("messages" in line):
        found = "both" if "prompt" in line else f"neither, but {_names(line)}"
        raise ValueError(f'needs one of "prompt" and "messages"; it has {found}')
    if "prompt" in line:
        return PromptLine(prompt=string(line["prompt"], '"prompt"'))
    messages = line["messages"]
    if not isinstance(messages, list) or not messages:
        raise ValueError(f'"messages" must be a non-empty list, not {_kind(messages)}')
    return PromptLine(
        messages=[_message(item, f"messages[{i}]") for i, item in enumerate(messages)]
    )


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


def _message(item: object, name: str) -> dict[str, str]:
    if not isinstance(item, dict):
        raise ValueError(f'{name} must be {{"role": ..., "content": ...}}, not {_kind(item)}')
    missing = [key for key in ("role", "content") if key not in item]
    if missing:
        raise ValueError(f'{name} has no "{missing[0]}"; it has {_names(item)}')
    return {key: string(item[key], f'{name}["{key}"]') for key in ("role", "content")}


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
