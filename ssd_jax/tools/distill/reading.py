"""Reading the prompts of an entry: JSON lines in the formats of `bench`, or plain text."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ssd_jax.errors import InputError
from ssd_jax.llm.prompt_files import CHAT_KEYS, BadLine, PromptLine, message_text, string
from ssd_jax.system.files import MAX_TEXT, decode, read_bytes
from ssd_jax.tools.bench.prompts import BUILT_IN, HUMANEVAL_REQUEST, parse_line, read_set
from ssd_jax.tools.distill.prompt_settings import PLAIN_TEXT, PromptEntry

_LONGEST_ID = 20
_ID_KEYS = ("task_id", "question_id", "id")


class Line(NamedTuple):
    """A prompt of a set.

    Attributes:
      id: the number that identifies the line, if it has one.
      later_turns: the user's later turns of the conversation, which are never asked.
      kind: its kind as the set names it; empty if it names none.
    """

    prompt: PromptLine
    id: int | None = None
    later_turns: tuple[str, ...] = ()
    kind: str = ""

    @classmethod
    def from_text(cls, text: str, kind: str = "") -> Line:
        """A line with nothing but a user's words."""
        return cls(PromptLine(prompt=text), kind=kind)

    @property
    def authored_text(self) -> str:
        """What the set's authors wrote: no system message, nothing that this package adds."""
        if self.prompt.messages is None:
            return self.prompt.prompt or ""
        texts = [message_text(m) for m in self.prompt.messages if m["role"] != "system"]
        head, tail = HUMANEVAL_REQUEST.split("{code}")
        if len(texts) == 1 and texts[0].startswith(head) and texts[0].endswith(tail):
            return texts[0].removeprefix(head).removesuffix(tail)
        return "\n\n".join(texts)


def find(entry: PromptEntry, directory: Path) -> Path | None:
    """The file of an entry; None is a built-in set.

    Raises:
      InputError: there is no such file, ids are asked of plain text, or tasks of another file.
    """
    if entry.path in BUILT_IN and entry.tasks is None:
        return None
    path = directory / entry.path
    if not path.is_file():
        raise InputError(
            f"prompts {entry.path!r}: {path} is no file, and the built-in sets are "
            f"{', '.join(BUILT_IN)}; give the directory of the files as --data "
            "(docs/distill.md says where to get those of the shipped configurations)"
        )
    if entry.is_plain_text and entry.ids is not None:
        raise InputError(f"prompts {entry.path!r}: lines of plain text have no ids; leave ids out")
    if not entry.is_plain_text and entry.tasks is not None:
        raise InputError(
            f"prompts {entry.path!r}: tasks are made over plain text ({', '.join(PLAIN_TEXT)}); "
            "leave tasks out"
        )
    return path


def read_lines(entry: PromptEntry, path: Path | None) -> list[Line | BadLine]:
    """The lines that an entry chooses, in order, with the bad ones of the file.

    Raises:
      InputError: a file that cannot be read, lines without ids, or a range without lines, which is
        a mistake or meant for another file.
    """
    lines = read_set(entry.path if path is None else str(path), _parse)
    ranges = entry.id_ranges
    if ranges is None:
        return lines
    numbers = [line.id for line in lines if isinstance(line, Line)]
    sorted_numbers = sorted(i for i in numbers if i is not None)
    if len(sorted_numbers) < len(numbers):
        raise InputError(
            f"prompts {entry}: {len(numbers) - len(sorted_numbers)} lines have no number under "
            f"{', '.join(_ID_KEYS)}; leave ids out"
        )
    ranges_by_text = zip((entry.ids or "").split(","), ranges, strict=True)
    empty = [
        text.strip() for text, ids in ranges_by_text if not any(i in ids for i in sorted_numbers)
    ]
    if empty and len(numbers) == len(lines):
        available = (
            f"there are {sorted_numbers[0]} to {sorted_numbers[-1]}"
            if sorted_numbers
            else "the file has no lines"
        )
        raise InputError(
            f"prompts {entry}: no line has one of the ids {','.join(empty)}, {available}; mend ids"
        )
    return [
        line for line in lines if isinstance(line, BadLine) or any(line.id in ids for ids in ranges)
    ]


def read_plain(path: Path) -> str:
    """The text of a plain text file.

    Raises:
      InputError: it cannot be read, or is not UTF-8, with the line.
    """
    data = read_bytes(path, max_bytes=MAX_TEXT, remedy="split it")
    return decode(data, path, remedy="save it again as such", encoding="utf-8-sig")


def passages(tokens: Sequence[int], length: int, *, prefix: Sequence[int]) -> list[list[int]]:
    """A text cut into passages of `length` tokens, each with the tokens `prefix` in front.

    A rest of less than half the length is dropped.
    """
    size = length - len(prefix)
    bodies = [list(tokens[begin : begin + size]) for begin in range(0, len(tokens), size)]
    return [[*prefix, *body] for body in bodies if 2 * len(body) >= size]


def _parse(line: Mapping[str, Any]) -> Line:
    prompt = parse_line(line)
    for key in (*CHAT_KEYS, "prompt_token_ids"):
        if key in line:
            raise ValueError(f'"{key}" means nothing for the text of a draft; leave it out')
    turns = enumerate(line.get("turns", ()))
    later_turns = tuple(string(turn, f"turns[{i}]") for i, turn in turns if i)
    ends = [re.search(r"\d+$", str(line.get(key, ""))) for key in _ID_KEYS]
    numbers = [int(end[0]) for end in ends if end and len(end[0]) < _LONGEST_ID]
    kind = line.get("category")
    return Line(
        prompt, numbers[0] if numbers else None, later_turns, "" if kind is None else str(kind)
    )
