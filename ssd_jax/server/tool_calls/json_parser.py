"""The parser of forms whose calls are JSON objects."""

from __future__ import annotations

import re
from collections.abc import Callable

from typing_extensions import override

from ssd_jax.server.tool_calls.call_reader import CallReader
from ssd_jax.server.tool_calls.json_scanner import SPACE
from ssd_jax.server.tool_calls.protocols import Arguments, CallParser, Content, Delta

_SEPARATOR = re.compile(f"[{SPACE}]*;?[{SPACE}]*")


class JsonCallParser(CallParser):
    """Finds calls behind a mark, and, if the form has it, without one at the start of the text.

    What begins as a call and is none is content, its mark included. Once arguments have come they
    cannot be taken back: if they then turn out to be no JSON, what follows belongs to them up to
    the mark behind the call. White space is content only between words of content, or if there is
    no call.

    Args:
      names, parallel: see `CallForm.parser`.
      begin: the mark before a call.
      end: the mark behind it, which may be missing; "" if the form has none.
      unmarked: whether a text may begin with a call without a mark, and calls follow one another
        without one.
    """

    def __init__(
        self, names: frozenset[str], *, begin: str, end: str, unmarked: bool, parallel: bool
    ) -> None:
        self._names, self._begin, self._end = names, begin, end
        self._unmarked, self._parallel = unmarked, parallel
        self._deltas: list[Delta] = []
        self._pending = ""
        self._state: Callable[[], bool] = self._at_start if unmarked else self._in_text
        self._lead = ""  # text before an object, which is content if that is no call
        self._reader = CallReader(names)
        self._has_call = self._has_content = False
        self._space = ""  # held back

    @override
    def push(self, text: str) -> list[Delta]:
        self._pending += text
        while self._state():
            pass
        return self._take()

    @override
    def finish(self) -> list[Delta]:
        rest, self._pending = self._pending, ""
        if self._state == self._in_malformed:
            self._add_arguments(rest)
        elif self._state == self._behind_mark:
            self._add_content(self._lead + rest)
        elif self._state == self._in_object:
            self._add_content(self._unread)
        else:
            self._add_content(rest)
        if self._space and not self._has_call:
            self._deltas.append(Content(self._space))
        return self._take()

    def _take(self) -> list[Delta]:
        deltas, self._deltas = self._deltas, []
        return deltas

    # Each of these reads what it can, and returns whether the text behind it can be read, too.

    def _at_start(self) -> bool:
        rest = self._pending.lstrip(SPACE)
        if rest.startswith("{"):
            self._open(self._pending[: -len(rest)], rest)
        elif rest:
            self._state = self._in_text
        return rest != ""

    def _in_text(self) -> bool:
        place = self._pending.find(self._begin)
        if place < 0:
            held = _overlap(self._pending, self._begin)
            self._add_content(self._pending[: len(self._pending) - held])
            self._pending = self._pending[len(self._pending) - held :]
            return False
        self._add_content(self._pending[:place])
        self._lead, self._pending = self._begin, self._pending[place + len(self._begin) :]
        self._state = self._behind_mark
        return True

    def _behind_mark(self) -> bool:
        rest = self._pending.lstrip(SPACE)
        lead = self._lead + self._pending[: len(self._pending) - len(rest)]
        if rest.startswith("{"):
            self._open(lead, rest)
        elif rest:
            self._add_content(lead)
            self._pending, self._state = rest, self._in_text
        return rest != ""

    def _open(self, lead: str, rest: str) -> None:
        self._lead, self._pending = lead, rest
        self._reader = CallReader(self._names)
        self._state = self._in_object

    def _in_object(self) -> bool:
        reader = self._reader
        count, deltas = reader.read(self._pending)
        self._pending = self._pending[count:]
        self._deltas += deltas
        self._has_call |= reader.called
        if reader.status == "no call":
            self._add_content(self._unread)
            self._state = self._in_text
        elif reader.status == "malformed":
            self._state = self._in_malformed
        elif reader.status == "call" and self._parallel:
            self._add_content(self._unread)
            self._state = self._behind_call
        elif reader.status == "call":
            self._state = self._left_out
        return reader.status != "open"

    @property
    def _unread(self) -> str:
        """The text of the object, and before it, that is no part of a call."""
        return ("" if self._reader.called else self._lead) + self._reader.text

    def _in_malformed(self) -> bool:
        place = self._pending.find(self._end) if self._end else -1
        if place < 0:
            held = _overlap(self._pending, self._end)
            self._add_arguments(self._pending[: len(self._pending) - held])
            self._pending = self._pending[len(self._pending) - held :]
            return False
        self._add_arguments(self._pending[:place])
        self._pending = self._pending[place + len(self._end) :]
        self._state = self._in_text if self._parallel else self._left_out
        return True

    def _behind_call(self) -> bool:
        if self._unmarked:
            match = _SEPARATOR.match(self._pending)
            assert match is not None
            rest = self._pending[match.end() :]
            if rest.startswith("{"):
                self._open(match[0], rest)
            elif rest:
                self._state = self._in_text
            return rest != ""
        rest = self._pending.lstrip(SPACE)
        if rest.startswith(self._end):
            self._pending = rest[len(self._end) :]
        elif self._end.startswith(rest):
            return False
        self._state = self._in_text
        return True

    def _left_out(self) -> bool:
        self._pending = ""
        return False

    def _add_arguments(self, text: str) -> None:
        if text:
            self._deltas.append(Arguments(text))

    def _add_content(self, text: str) -> None:
        text = self._space + text
        words = text.rstrip(SPACE)
        self._space = text[len(words) :]
        if self._has_call and not self._has_content:
            words = words.lstrip(SPACE)
        if words:
            self._deltas.append(Content(words))
            self._has_content = True


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of a text with which the mark may begin."""
    sizes = range(min(len(mark) - 1, len(text)), 0, -1)
    return next((size for size in sizes if mark.startswith(text[-size:])), 0)
