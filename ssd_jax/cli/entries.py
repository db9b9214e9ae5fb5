"""Names with texts beside them, as `--help` lists flags and commands."""

from __future__ import annotations

import shutil
import textwrap

COLUMN = 22
"""Column of the texts."""

_WIDEST = 100


def entry(name: str, text: str) -> str:
    """A name and its text, wrapped beside it."""
    return wrap_text(text, f"  {name:{COLUMN - 3}} ", " " * COLUMN)


def wrap_text(text: str, indent: str = "", subsequent_indent: str = "") -> str:
    """A text in lines that fit the terminal, behind `indent` and `subsequent_indent`."""
    width = max(min(shutil.get_terminal_size().columns, _WIDEST), 2 * COLUMN)
    return textwrap.fill(
        text,
        width,
        initial_indent=indent,
        subsequent_indent=subsequent_indent,
        break_on_hyphens=False,
    )
