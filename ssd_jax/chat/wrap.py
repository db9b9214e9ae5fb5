"""Words that arrive in pieces, put on lines of a terminal without being broken at its margin."""

from __future__ import annotations

import re

from rich.cells import cell_len

_HELD = 24
_PIECES = re.compile(r"\n|[ \t]+|[\u2e80-\U0010ffff]|[^ \t\n\u2e80-\U0010ffff]+")


class WordWrap:
    """Breaks lines at spaces only; what is longer than a line is left to the terminal, so that a
    copied address stays whole. A word is held back until its end is known, or 24 cells of it;
    letters of scripts that are written without spaces are not.

    Args:
      width: cells of a line.
    """

    def __init__(self, width: int) -> None:
        self._width = width
        self._column = 0
        self._space = ""
        self._word = ""

    def push(self, text: str) -> str:
        """What may be shown of the text so far, beyond what was returned before."""
        shown = ""
        for piece in _PIECES.findall(text):
            if piece == "\n":
                shown += self.flush() + "\n"
                self._column, self._space = 0, ""
            elif piece.isspace():
                shown += self.flush()
                self._space += piece
            elif piece >= "\u2e80":
                shown += self.flush()
                self._word = piece
                shown += self.flush()
            else:
                self._word += piece
                if cell_len(self._word) >= _HELD:
                    shown += self.flush()
        return shown

    def flush(self) -> str:
        """The word that was held back, on this line or the next."""
        if not self._word:
            return ""
        space, word = self._space, self._word
        self._space = self._word = ""
        needed = cell_len(space.expandtabs()) + cell_len(word)
        if self._column and space and self._column + needed > self._width:
            self._column = cell_len(word)
            return f"\n{word}"
        self._column = (self._column + needed) % self._width
        return space + word
