"""Reads one call that is a JSON object with a name and arguments."""

from __future__ import annotations

import json
from typing import Literal

from ssd_jax.server.tool_calls.json_scanner import SPACE, JsonScanner
from ssd_jax.server.tool_calls.protocols import Arguments, CallBegin, Delta

_ARGUMENTS = ("arguments", "parameters")
_KEYS = frozenset({"name", "type", "id", *_ARGUMENTS})
"""Members that a call may have; an object with others before its arguments is none."""


class CallReader:
    """The object of one call, from its first brace on.

    A call whose name comes first begins with its arguments, which then come as they are written.
    One with another order comes when its object is complete.

    Args:
      names: of the functions that may be called.

    Attributes:
      status: "open"; "call" behind the object, or behind its arguments where no JSON follows;
        "no call" where it is something else; "malformed" where the arguments, of which some have
        come, are no JSON.
      text: what was read and has not come as part of the call; "" once the object is a call.
    """

    def __init__(self, names: frozenset[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self.status: Literal["open", "call", "no call", "malformed"] = "open"
        self.text = ""
        self._name: str | None = None
        self._members: dict[str, str] = {}  # JSON texts of values
        self._value = ""
        self._arguments: Literal["to come", "open", "complete"] = "to come"

    @property
    def called(self) -> bool:
        """Whether a part of the call has come."""
        return self._arguments != "to come"

    def read(self, text: str) -> tuple[int, list[Delta]]:
        """Reads more text, at most to the end of the call.

        Returns: the number of characters that belong to the call, and what they add.
        """
        deltas: list[Delta] = []
        arguments: list[str] = []
        count = 0
        for character in text:
            self._scanner.push(character)
            if self._scanner.status == "broken":
                self.status = self._at_break()
                break
            count += 1
            if self._arguments != "open":
                self.text += character
            if self._follow(character):
                assert self._name is not None
                deltas.append(CallBegin(self._name))
                self.text = ""
            if self._arguments == "open":
                arguments.append(self._value)
                self._value = ""
            if self._scanner.value_ends:
                self._end_member()
            if self._scanner.status == "complete" and self.status == "open":
                deltas += self._end()
            if self.status != "open":
                break
        if arguments:
            deltas.append(Arguments("".join(arguments)))
        return count, deltas

    def _follow(self, character: str) -> bool:
        """Takes a character of a value; returns whether the call begins with it."""
        scanner = self._scanner
        if not scanner.in_value:
            return False
        self._value += character
        if self.called:
            return False
        if scanner.key not in _KEYS:
            self.status = "no call"
            return False
        is_begin = (
            self._name is not None
            and scanner.key in _ARGUMENTS
            and self._value[0] == "{"
            and self._value.lstrip(f"{{{SPACE}") != ""  # behind the brace is JSON, too
        )
        if is_begin:
            self._arguments = "open"
        return is_begin

    def _end_member(self) -> None:
        key = self._scanner.key
        assert key is not None
        if self._arguments == "open":
            self._arguments = "complete"
        else:
            self._members.setdefault(key, self._value)
            if key == "name" and not self.called:
                self._name = self._known_name(self._value)
                if self._name is None:
                    self.status = "no call"
        self._value = ""

    def _known_name(self, value: str) -> str | None:
        name = json.loads(value) if value.startswith('"') else None
        return name if name in self._names else None

    def _at_break(self) -> Literal["call", "no call", "malformed"]:
        if not self.called:
            return "no call"
        return "call" if self._arguments == "complete" else "malformed"

    def _end(self) -> list[Delta]:
        """What the end of the object adds."""
        deltas: list[Delta] = []
        if not self.called:
            arguments = self._whole_arguments()
            if self._name is None or arguments is None:
                self.status = "no call"
                return []
            self._arguments = "complete"
            deltas = [CallBegin(self._name), Arguments(arguments)]
        self.status, self.text = "call", ""
        return deltas

    def _whole_arguments(self) -> str | None:
        """The text of an object, also of one in a string; None for anything else."""
        values = [self._members[key] for key in _ARGUMENTS if key in self._members]
        text = values[0] if values else "null"
        if text == "null":
            return "{}"
        if text.startswith("{"):
            return text
        try:
            inner = json.loads(text)
            return inner if isinstance(json.loads(inner), dict) else None
        except (TypeError, ValueError, RecursionError):
            return None
