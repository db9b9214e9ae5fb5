"""Follows the text of a JSON object, character by character."""

from __future__ import annotations

import json
import re
import string
from collections.abc import Callable
from typing import Literal

SPACE = " \t\r\n"
"""White space of JSON."""

_WORD = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?|true|false|null")
_WORD_CHARACTERS = frozenset(f"{string.ascii_letters}{string.digits}+-.")
_WORD_BEGINS = frozenset("-0123456789tfn")
_ESCAPES = frozenset('"\\/bfnrt')
_ENDS = {"{": "}", "[": "]"}


class JsonScanner:
    """The place in an object, whose members are told apart.

    Attributes:
      status: "complete" behind the last brace, "broken" at a character that JSON forbids.
      key: the member whose value comes, or came last.
      in_value: whether the last character belongs to that value.
      value_ends: whether the last character ends that value, or is the first behind it.
    """

    def __init__(self) -> None:
        self.status: Literal["open", "complete", "broken"] = "open"
        self.key: str | None = None
        self.in_value = self.value_ends = False
        self._stack: list[str] = []  # brackets that are open
        self._read: Callable[[str], bool] = self._begin
        self._string = ""  # of a member's key, as it is written
        self._is_key = False
        self._word = ""
        self._value_open = False

    def push(self, character: str) -> None:
        """Moves behind a character, unless it breaks the object."""
        if self.status != "open":
            return
        self.value_ends = False
        self.in_value = self._value_open
        if not self._read(character):
            self.status = "broken"
            self.in_value = False

    def _begin(self, character: str) -> bool:
        return character == "{" and self._open(character)

    def _open(self, bracket: str) -> bool:
        self._stack.append(bracket)
        self._read = self._first_key if bracket == "{" else self._first_item
        return True

    def _close(self, bracket: str) -> bool:
        if _ENDS[self._stack.pop()] != bracket:
            return False
        if self._stack:
            self._end_value()
        else:
            self.status = "complete"
        return True

    def _first_key(self, character: str) -> bool:
        return self._close(character) if character == "}" else self._next_key(character)

    def _next_key(self, character: str) -> bool:
        if character == '"':
            self._is_key, self._string = True, ""
            self._read = self._in_string
            return True
        return character in SPACE

    def _colon(self, character: str) -> bool:
        if character == ":":
            self._read = self._value
            return True
        return character in SPACE

    def _first_item(self, character: str) -> bool:
        return self._close(character) if character == "]" else self._value(character)

    def _value(self, character: str) -> bool:
        if character in SPACE:
            return True
        if len(self._stack) == 1:
            self._value_open = self.in_value = True
        if character in _ENDS:
            return self._open(character)
        if character == '"':
            self._is_key = False
            self._read = self._in_string
            return True
        self._word, self._read = character, self._in_word
        return character in _WORD_BEGINS

    def _end_value(self) -> None:
        if len(self._stack) == 1:
            self._value_open, self.value_ends = False, True
        self._read = self._next

    def _next(self, character: str) -> bool:
        if character == ",":
            self._read = self._next_key if self._stack[-1] == "{" else self._value
            return True
        return self._close(character) if character in "}]" else character in SPACE

    def _in_word(self, character: str) -> bool:
        if character in _WORD_CHARACTERS:
            self._word += character
            return True
        if _WORD.fullmatch(self._word) is None:
            return False
        self.in_value = len(self._stack) > 1 and self.in_value
        self._end_value()
        return self._next(character)

    def _in_string(self, character: str) -> bool:
        if character == '"':
            return self._end_string()
        if character == "\\":
            self._read = self._escape
        self._note(character)
        return character >= " "

    def _end_string(self) -> bool:
        if not self._is_key:
            self._end_value()
            return True
        if len(self._stack) == 1:
            self.key = json.loads(f'"{self._string}"')
        self._read = self._colon
        return True

    def _escape(self, character: str) -> bool:
        self._note(character)
        if character == "u":
            self._word, self._read = "", self._hexadecimal
            return True
        self._read = self._in_string
        return character in _ESCAPES

    def _hexadecimal(self, character: str) -> bool:
        self._note(character)
        self._word += character
        if len(self._word) == 4:
            self._read = self._in_string
        return character in string.hexdigits

    def _note(self, character: str) -> None:
        if self._is_key and len(self._stack) == 1:
            self._string += character
