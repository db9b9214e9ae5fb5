"""Which tests run by which command.

`make test-fast` has those of files that compile nothing and start nothing, by what they import.
A file is not if it, or a helper of the tests that it imports, imports one of `HEAVY`. So a new file
needs no marker, and one that begins to build models leaves `make test-fast` by itself.

`make slow PART=3/8` has the third of eight parts of the slow suite, `make test-ci MORE=1/10` the
first of ten parts of the tests marked `more`.
"""

from __future__ import annotations

import argparse
import ast
import dataclasses
import functools
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = frozenset(
    {
        "flax",
        "jax",
        "optax",
        "orbax",
        "pty",
        "subprocess",
        "multiprocessing",
        "ssd_jax.LLM",
        "ssd_jax.cli.main",
        "ssd_jax.llm.llm",
        "ssd_jax.testing.tiny",
        "tests.fuzz",  # readers in a process with limits
    }
)


def is_fast(path: Path) -> bool:
    """Whether a test file needs no compiled program, no whole model and no process."""
    return not _is_heavy(path.resolve(), frozenset())


@functools.cache
def _imports(path: Path) -> tuple[str, ...]:
    return tuple(_names(ast.parse(path.read_text())))


def _names(tree: ast.AST) -> Iterator[str]:
    """Dotted names that are imported anywhere in a file, names taken from modules with them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_heavy(path: Path, seen: frozenset[Path]) -> bool:
    for name in _imports(path):
        parts = name.split(".")
        if any(".".join(parts[:length]) in HEAVY for length in range(1, len(parts) + 1)):
            return True
        helper = ROOT.joinpath(*parts).with_suffix(".py")
        known = parts[0] != "tests" or helper in seen or not helper.exists()
        if not known and _is_heavy(helper, seen | {path}):
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Part:
    """One of `parts` pieces of some tests, by its number from 1 on."""

    number: int
    parts: int

    @classmethod
    def parse(cls, text: str) -> Part:
        """Reads `3/8`; anything else is an error of `argparse`."""
        match = re.fullmatch(r"(\d+)/(\d+)", text)
        part = cls(*map(int, match.groups())) if match else None
        if part is None or not 1 <= part.number <= part.parts:
            raise argparse.ArgumentTypeError(
                f"{text!r} is no part: write 3/8 for the third of eight"
            )
        return part

    def of(self, items: Sequence[Any]) -> slice:
        """Where the piece lies in a list, whose pieces differ by one in length at most.

        Tests of a piece are neighbours, so that those of one file share its fixtures.
        """
        first, end = (len(items) * n // self.parts for n in (self.number - 1, self.number))
        return slice(first, end)

    def has(self, name: str) -> bool:
        """Whether a test is in the piece, by its name alone: cases of a matrix are spread evenly,
        and stay in their piece where tests come and go."""
        return zlib.crc32(name.encode()) % self.parts == self.number - 1


def cases(values: Iterable[Any], *default: Any) -> list[Any]:
    """Values of a parameter, those that are not of `default` for `make test-more` alone."""
    values = list(values)
    assert all(value in values for value in default)
    return [
        pytest.param(
            *(value if isinstance(value, tuple) else (value,)),
            marks=() if value in default else pytest.mark.more,
        )
        for value in values
    ]
