"""Section [prompts] of a distillation: files of prompts, and which part of each."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ssd_jax.errors import InputError
from ssd_jax.tools.distill.value_types import Count, Passage

SPLITS = ("train", "held_out")
PLAIN_TEXT = (".txt", ".md", ".rst")
"""Endings of the names of plain text files."""


class PromptEntry(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A file of prompts, a part of it, or tasks over it.

    Attributes:
      path: a built-in set, or a file relative to the directory of the prompts.
      ids: which of its lines, such as 1-10,511-974; None is all.
      limit: most prompts that are taken, spread evenly over it; None is all.
      tasks: of a plain text: number of tasks over its passages, instead of these; None is passages.
      times: copies of each prompt, which are completed with other temperatures and noise.
    """

    path: Annotated[str, Meta(min_length=1)]
    ids: str | None = None
    limit: Count | None = None
    tasks: Count | None = None
    times: Count = 1

    @property
    def is_plain_text(self) -> bool:
        """Whether the file is cut into passages."""
        return Path(self.path).suffix in PLAIN_TEXT

    @property
    def id_ranges(self) -> tuple[range, ...] | None:
        """The ranges of `ids`."""
        return None if self.ids is None else parse_ranges(self.ids, self.path)

    @property
    def set(self) -> str:
        """Set that its prompts are counted under."""
        return self.path if self.tasks is None else f"{self.path}:tasks"

    def __str__(self) -> str:
        times = self.times if self.times > 1 else None
        options = (("limit", self.limit), ("tasks", self.tasks), ("times", times))
        parts = [f"{name}={value}" for name, value in options if value is not None]
        parts = parts if self.ids is None else [self.ids, *parts]
        return f"{self.path}[{', '.join(parts)}]" if parts else self.path


Files = Annotated[
    tuple[str | PromptEntry, ...],
    Meta(
        description='is not understood; list files as "PATH" or {path = "PATH"}, with ids = "1-10"'
        ", limit = 1000, tasks = 1000 or times = 2 beside path"
    ),
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptSettings:
    """Section [prompts]: what the target is asked, and what stays unseen.

    Attributes:
      train, held_out: files and built-in sets; without any to train, drafts are only evaluated.
      directory: where files are, relative to the configuration file.
      longest: prompts of more tokens are left out.
      passage_tokens: tokens of a passage of a plain text file.
    """

    train: Files = ()
    held_out: Files = ()
    directory: str = "."
    longest: Count = 512
    passage_tokens: Passage = 128

    def __post_init__(self) -> None:
        if not self.held_out:
            raise InputError("held_out is empty; list at least one file of prompts")
        cut = False
        for name in SPLITS:
            files = getattr(self, name)
            entries = tuple(PromptEntry(path=e) if isinstance(e, str) else e for e in files)
            object.__setattr__(self, name, entries)
            cut = cut or any(entry.is_plain_text and not entry.tasks for entry in entries)
            for index, entry in enumerate(entries):
                parse_ranges("1" if entry.ids is None else entry.ids, f"{name}: {entry.path}")
                if any(other.set == entry.set for other in entries[:index]):
                    raise InputError(
                        f"{name} lists {entry.path!r} twice; put its ids into one entry"
                    )
        if cut and self.passage_tokens > self.longest:
            raise InputError(
                f"passage_tokens = {self.passage_tokens} is more than longest = {self.longest}; "
                "lower the one or raise the other"
            )


_RANGE = re.compile(r"\s*(\d+)(?:-(\d+))?\s*")


def parse_ranges(text: str, label: str) -> tuple[range, ...]:
    """The ranges of a text such as "1-10,511-974"; both ends belong to a range.

    Raises:
      InputError: not such a text, or a range ends before it begins; with `label` in front.
    """
    ranges = []
    for item in text.split(","):
        match = _RANGE.fullmatch(item)
        first, last = (int(end or match[1]) for end in match.groups()) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{label}: {item.strip()!r} of {text!r} is no range; give ids such as 1-10,511-974"
            )
        ranges.append(range(first, last + 1))
    return tuple(ranges)
