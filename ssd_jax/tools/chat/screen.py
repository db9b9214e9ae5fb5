"""Shows the model's words on standard output, everything else on standard error."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, RenderableType
from rich.text import Text

from ssd_jax.system.files import printable

_MAX_HELD_CELLS = 24
_PIECES = re.compile(r"\n|[ \t]+|[\u2e80-\U0010ffff]|[^ \t\n\u2e80-\U0010ffff]+")


class WordWrap:
    """Breaks lines at spaces only.

    A word longer than a line is left to the terminal, so that a copied address stays whole. A word
    is held back until its end or 24 cells of it are known; letters of scripts that are written
    without spaces are not held back.

    Args:
      width: cells of a line.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._space = ""
        self._word = ""

    def push(self, text: str) -> str:
        """Takes more text; returns what can now be shown and was not returned before."""
        output = ""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                output += self.flush() + "\n"
                self._column, self._space = 0, ""
            elif piece.isspace():
                output += self.flush()
                self._space += piece
            elif piece >= "\u2e80":
                output += self.flush()
                self._word = piece
                output += self.flush()
            else:
                self._word += piece
                if cell_len(self._word) >= _MAX_HELD_CELLS:
                    output += self.flush()
        return output

    def flush(self) -> str:
        """The held-back word, on this line or the next."""
        if not self._word:
            return ""
        space, word = self._space, self._word
        self._space = self._word = ""
        width = cell_len(space.expandtabs()) + cell_len(word)
        if self._column and space and self._column + width > self._width:
            self._column, space, width = 0, "\n", cell_len(word)
        self._column += width
        if self._column > self._width:  # the terminal broke the line
            self._column = (self._column - 1) % self._width + 1
        return space + word


class Screen:
    """Prints answers and messages about them.

    Args:
      out: takes the model's words.
      console: takes the rest; it knows about NO_COLOR and simple terminals.
    """

    def __init__(self, out: TextIO, console: Console) -> None:
        self._out = out
        self._console = console
        self._terminal = out.isatty()
        self._wrap = WordWrap(console.width)
        self._activity = contextlib.ExitStack()
        self._ends_line = True
        self._reasons = False  # whether a line of reasoning is open

    def note(self, text: str) -> None:
        """Prints a remark, dimmed."""
        self._line(text, "dim")

    def say(self, text: str) -> None:
        """Prints the reply to a command."""
        self._line(text)

    def error(self, text: str) -> None:
        """Prints what was not done, and why."""
        self._line(text, "red")

    def show(self, renderable: RenderableType) -> None:
        """Prints a table, after a blank line."""
        self._console.print()
        self._console.print(renderable)

    @contextlib.contextmanager
    def answer(self, while_waiting: str) -> Iterator[None]:
        """Surrounds an answer: shows activity until its first word, and ends its last line."""
        with contextlib.ExitStack() as activity:
            if self._console.is_interactive and not self._console.is_dumb_terminal:
                status = Text(while_waiting, style="dim")
                activity.enter_context(self._console.status(status, spinner="line"))
            self._activity, self._ends_line = activity, True
            self._wrap = WordWrap(self._console.width)
            yield
        self._end_reasoning()
        if self._terminal:
            self._write(self._wrap.flush())
        if not self._ends_line:
            self._write("\n")

    def write_answer(self, text: str) -> None:
        """Prints the next words of an answer."""
        self._activity.close()
        self._end_reasoning()
        self._write(self._wrap.push(printable(text)) if self._terminal else text)

    def write_reasoning(self, text: str) -> None:
        """Prints the next words of what leads to an answer, dimmed and not with the answer's."""
        self._activity.close()
        shown = Text(printable(text) if self._console.is_terminal else text, style="dim")
        self._console.print(shown, end="", soft_wrap=True, highlight=False)
        self._reasons = not text.endswith("\n")

    def _end_reasoning(self) -> None:
        if self._reasons:
            self._console.print()
            self._reasons = False

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()
            self._ends_line = text.endswith("\n")

    def _line(self, text: str, style: str = "") -> None:
        terminal = self._console.is_terminal
        output = Text(printable(text) if terminal else text, style=style)
        # Without a terminal a line stays whole: rich would break it at 80 columns.
        self._console.print(output, soft_wrap=not terminal, highlight=False)
