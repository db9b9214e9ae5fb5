"""Decides whether the draft is asked before the target's forward is dispatched, or behind it.

A message takes a processor some tenths of a millisecond. Sent first, it lets the draft begin as
early as it can, and the target waits for it; behind the dispatch, which may take milliseconds, only
the draft waits. That costs nothing while the draft has nothing left to do when the outcome comes.
"""

from __future__ import annotations

import math
from collections import deque

_ROUNDS = 8
_MARGIN = 2e-4  # seconds


class Order:
    """The order of the next round's calls.

    Args:
      first: whether the draft is asked first, to begin with.
      changes: whether that changes with the time that the draft has left.

    Attributes:
      first: whether it is asked first in the next round.
    """

    def __init__(self, *, first: bool, changes: bool = False) -> None:
        self.first, self._changes = first, changes
        self._spare: deque[float] = deque(maxlen=_ROUNDS)
        self._delay = math.inf

    def ended(self, spare: float) -> None:
        """Takes the seconds from the end of the draft's work to the outcome, of one round; 0 if it
        was not through."""
        self._spare.append(spare)
        if not self._changes or (self.first and len(self._spare) < _ROUNDS):
            return
        needed = _MARGIN + (self._delay if self.first else 0.0)
        first = min(self._spare) < needed
        if first != self.first:
            self.first = first
            self._spare.clear()  # which was of the other order

    def delayed(self, seconds: float) -> None:
        """Takes how much later the draft is asked, or would be, behind the target's dispatch."""
        self._delay = seconds
