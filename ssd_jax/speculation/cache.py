"""The speculation cache of one sequence: branches prepared for outcomes, found by their path.

A verification starts at its pending token, at an absolute position `start`, and its outcome (k, t*)
commits s_1..s_k, t* after it. Those tokens are the path of the branch that was prepared for this
outcome; the branch's own tokens are what it proposes next. A branch is good for as long as the
committed text stays on path and tokens, whichever round that is. Pure host code.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class Entry(NamedTuple):
    """A branch.

    Attributes:
      row: its number on the draft.
      path: s_1..s_k, t* of its outcome, at least t*.
      rank: place of t* among the bonus tokens prepared for this k, from 0.
      tokens: what it proposes, as far as known.
      confidence: the draft's in each of them; see `fan_out.FanOut.counts`.
    """

    row: int
    path: tuple[int, ...]
    rank: int = 0
    tokens: tuple[int, ...] = ()
    confidence: tuple[int, ...] = ()

    @property
    def k(self) -> int:
        """Accepted tokens of its outcome."""
        return len(self.path) - 1


class Hit(NamedTuple):
    """The branch that the committed text is on.

    Attributes:
      used: its tokens that are committed already; the last of them is then the pending token.
    """

    entry: Entry
    used: int


class SpeculationCache:
    """Branches of one verification, all of them still possible.

    Args:
      start: position of the sequence's first pending token, the last one of its prompt.
    """

    def __init__(self, start: int) -> None:
        self._start = start
        self._committed: list[int] = []  # after start
        self._entries: dict[int, Entry] = {}  # by row; each agrees with what is committed

    def fill(self, start: int, entries: Iterable[Entry]) -> None:
        """Replaces all branches by those prepared for the verification that starts at `start`, with
        the tokens that they have so far.

        Late ones are taken for what they are still worth. Ones older than the branches held, or
        past the committed text, are ignored. Of branches with the same path the lowest row stays:
        to look at their tokens would bias them.
        """
        passed = start - self._start
        if not 0 <= passed <= len(self._committed):
            return
        self._start, self._committed = start, self._committed[passed:]
        by_path: dict[tuple[int, ...], Entry] = {}
        for entry in sorted(entries, key=lambda entry: entry.row):
            by_path.setdefault(entry.path, entry)
        self._entries = {entry.row: entry for entry in by_path.values() if self._fits(entry)}

    def prepared(self, start: int) -> bool:
        """Whether a branch is held of the verification that starts at `start`."""
        return start == self._start and bool(self._entries)

    def advance(self, committed: Iterable[int]) -> None:
        """Takes newly committed tokens, the last of which is pending; drops what is off their path.

        Between rounds this makes the outcome known: `find` then looks it up.
        """
        self._committed.extend(committed)
        self._drop_stale()

    def find(self) -> Hit | None:
        """The branch that goes on from the pending token, if one was prepared.

        Where none was prepared for exactly this text, one that the text has run along will do if
        it has a token left.
        """
        size, best = len(self._committed), None
        for entry in self._entries.values():
            used = size - len(entry.path)
            usable = used == 0 or 0 < used < len(entry.tokens)
            if usable and (best is None or used < best.used):
                best = Hit(entry, used)
        return best

    def _drop_stale(self) -> None:
        self._entries = {row: entry for row, entry in self._entries.items() if self._fits(entry)}

    def _fits(self, entry: Entry) -> bool:
        """Whether branch and committed text agree as far as both go."""
        prepared, committed = [*entry.path, *entry.tokens], self._committed
        return prepared[: len(committed)] == committed[: len(prepared)]
