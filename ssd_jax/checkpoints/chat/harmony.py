"""Texts in OpenAI's harmony format, which gpt-oss writes: messages in channels.

A text goes on behind `<|start|>assistant`:

    <|channel|>analysis<|message|>I see.<|end|><|start|>assistant<|channel|>final<|message|>Yes.

The reasoning is in the channel `analysis`, the answer in `final`, and calls of functions go to a
recipient, `<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>`.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping

MARKS = (
    *("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>"),
    *("<|end|>", "<|call|>", "<|return|>"),
)
"""Control tokens of the format."""

_ENDS = ("<|start|>", "<|channel|>", "<|end|>", "<|call|>", "<|return|>")
"""Marks that a message does not go on behind."""
_HEADS = ("<|channel|>", " to=")
"""With which a text begins that has channels."""
_CHANNEL = re.compile(r"<\|channel\|>\s*(\w+)")
_RECIPIENT = re.compile(r"\bto=([^\s<]+)")


def writes_harmony(template: str | None) -> bool:
    """Whether the texts of a model with this chat template have channels."""
    return template is not None and {"<|channel|>", "<|message|>"} <= {
        mark for mark in MARKS if mark in template
    }


def mark_ids(template: str | None, added_tokens: Mapping[str, int]) -> frozenset[int]:
    """Ids of the marks, which a text must show to be read; none if it has no channels."""
    if not writes_harmony(template):
        return frozenset()
    return frozenset(added_tokens[mark] for mark in MARKS if mark in added_tokens)


@dataclasses.dataclass(frozen=True, slots=True)
class MessagePart:
    """More of a message.

    Attributes:
      channel: `analysis`, `commentary` or `final`.
      recipient: to whom it goes, `functions.NAME`; None is the user.
      text: the text; empty in the first piece of a message.
      is_first: whether the message begins with it.
    """

    channel: str
    recipient: str | None
    text: str = ""
    is_first: bool = False


class HarmonyReader:
    """Tells messages apart while a text grows.

    A text that begins with no mark, as under a grammar of its own or within a continued message, is
    one message in `final`. All pieces of a text, joined, are the same however it is cut. Text is
    held back only while it may be the beginning of a mark, and in headers.
    """

    def __init__(self) -> None:
        self._pending = ""
        self._in_header = False
        self._message: MessagePart | None = None  # None before the first

    def push(self, text: str) -> list[MessagePart]:
        """What more text adds."""
        self._pending += text
        if self._message is None and not self._in_header and not self._begins():
            return []
        pieces: list[MessagePart] = []
        while self._read(pieces):
            pass
        return pieces

    def finish(self) -> list[MessagePart]:
        """What was held back at the end of the text."""
        rest, self._pending = self._pending, ""
        if self._in_header or not rest:
            return []
        if self._message is None:
            return [*self._open(MessagePart("final", None)), MessagePart("final", None, rest)]
        return [dataclasses.replace(self._message, text=rest)]

    def _begins(self) -> bool:
        """Whether it is known if the text has channels; False while that may still be."""
        if any(self._pending.startswith(head) for head in _HEADS):
            self._in_header = True
        elif any(head.startswith(self._pending) for head in _HEADS):
            return False
        return True

    def _read(self, pieces: list[MessagePart]) -> bool:
        """Reads what it can; returns whether the text behind it can be read, too."""
        if self._in_header:
            header, mark, rest = self._pending.partition("<|message|>")
            if not mark:
                return False
            channel, recipient = _CHANNEL.search(header), _RECIPIENT.search(header)
            self._in_header, self._pending = False, rest
            kind = "final" if channel is None else channel[1]
            pieces += self._open(MessagePart(kind, recipient and recipient[1]))
            return True
        if self._message is None:
            pieces += self._open(MessagePart("final", None))
        assert self._message is not None
        places = [self._pending.find(mark) for mark in _ENDS]
        end = min((place for place in places if place >= 0), default=-1)
        known = end if end >= 0 else len(self._pending) - _held(self._pending)
        if known:
            pieces.append(dataclasses.replace(self._message, text=self._pending[:known]))
        self._pending = self._pending[known:]
        if end < 0:
            return False
        self._in_header = True
        return True

    def _open(self, message: MessagePart) -> list[MessagePart]:
        self._message = message
        return [dataclasses.replace(message, is_first=True)]


def _held(text: str) -> int:
    """Length of the longest end of a text with which a mark may begin."""
    sizes = range(min(max(map(len, _ENDS)) - 1, len(text)), 0, -1)
    return next((n for n in sizes if any(mark.startswith(text[-n:]) for mark in _ENDS)), 0)
