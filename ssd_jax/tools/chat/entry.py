"""Typed entries: when an entry is complete, and what it means.

An entry is one line. It continues in the next line if the line ends in a backslash, and up to the
closing quotes if it starts with three quotes. The raw text keeps these marks, so that an entry
recalled from the history reads as it did the first time.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ssd_jax.errors import InputError

_QUOTES = '"""'


class CommandSpec(NamedTuple):
    """A command: how it is written and what it does."""

    usage: str
    text: str

    @property
    def takes(self) -> bool:
        """Whether anything may follow its name."""
        return " " in self.usage


_SPECS = (
    CommandSpec("/help", "this list"),
    CommandSpec("/mode [MODE]", "show the decoding modes, or switch to one"),
    CommandSpec("/stats", "figures of the last answer and of the session"),
    CommandSpec(
        "/save [FILE]",
        "write the conversation for generate --prompt_file and /load; /save! replaces a file",
    ),
    CommandSpec("/load FILE", "go on with a conversation that was saved"),
    CommandSpec("/system [TEXT]", "show or set the system message; /system - removes it"),
    CommandSpec("/retry", "answer the last message again (greedy answers stay the same)"),
    CommandSpec("/reset", "forget the conversation, keep the system message"),
    CommandSpec("/exit", "leave; so does Ctrl-D"),
)
COMMANDS = {spec.usage.split()[0].removeprefix("/"): spec for spec in _SPECS}
_SYNONYMS = {"quit": "exit", "bye": "exit", "?": "help", "h": "help"}


class Command(NamedTuple):
    """A command and its argument; `forced` if a ! follows its name."""

    name: str
    argument: str = ""
    forced: bool = False


def entries(lines: Iterable[str]) -> Iterator[str]:
    """The raw entries of lines; the end of the lines ends an open entry.

    A byte order mark before the first line is no part of it.
    """
    raw: str | None = None
    for number, line in enumerate(lines):
        if number == 0:
            line = line.removeprefix("\ufeff")
        content = line.removesuffix("\n").removesuffix("\r")
        raw = content if raw is None else f"{raw}\n{content}"
        if not is_open(raw):
            yield raw
            raw = None
    if raw is not None:
        yield raw


def is_open(raw: str) -> bool:
    """Whether an entry continues in another line."""
    if raw.startswith(_QUOTES):
        end = raw[len(_QUOTES) :].rstrip()
        return not end.endswith(_QUOTES)
    return raw.endswith("\\")


def parse(raw: str) -> Command | str:
    """The command or the message of a complete entry; a message may be empty.

    Only a single line that starts with / is a command, so a space before it sends it as text.

    Raises:
      InputError: an unknown command, with the nearest one, or an argument to one that takes none.
    """
    if raw.startswith(_QUOTES):
        return raw[len(_QUOTES) :].rstrip().removesuffix(_QUOTES).strip("\n")
    if raw.startswith("/") and "\n" not in raw:
        return _command(raw)
    return raw.removesuffix("\\").replace("\\\n", "\n").strip()


def _command(line: str) -> Command:
    typed_name, _, argument = line[1:].strip().partition(" ")
    forced = typed_name.endswith("!")
    name = typed_name.removesuffix("!").lower()
    name = _SYNONYMS.get(name, name)
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean /{near[0]}?" if near else "/help lists the commands."
        raise InputError(
            f"unknown command /{typed_name}; {hint} To send it as text, put a space before it"
        )
    argument = argument.strip()
    if argument and not COMMANDS[name].takes:
        raise InputError(f"/{name} takes nothing after it, not {argument!r}")
    if forced and name != "save":
        raise InputError(f"/{name} has no form with !; use /{name}")
    return Command(name=name, argument=argument, forced=forced)
