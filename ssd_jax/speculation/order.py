"""Decides whether the draft is asked before the target's forward is dispatched, or behind it.

A message takes a processor some tenths of a millisecond. Sent first, it lets the draft begin as
early as it can, and the target waits for it; behind the dispatch, which may take milliseconds, only
the draft waits. That costs nothing while the draft has nothing left to do when the outcome comes.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from ssd_jax.roles.activity import FORWARDS, Busy

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
        self._asked: deque[tuple[float, int]] = deque(maxlen=2)
        self._done: list[Busy] = []  # forwards that have been reported

    def delayed(self, seconds: float) -> None:
        """Takes how much later the draft is asked, or would be, behind the target's dispatch."""
        self._delay = seconds

    def asked(self, at: float, forwards: int) -> None:
        """Takes when the draft was asked for branches, and for how many forwards."""
        self._asked.append((at, forwards))

    def worked(self, spans: Sequence[Busy]) -> None:
        """Takes what the draft has done."""
        if self._changes:
            self._done += (span for span in spans if span.what in FORWARDS)

    def outcome(self, at: float) -> None:
        """Takes when the outcome came that the branches before the last asked for were for."""
        if len(self._asked) < 2:
            return
        (begin, forwards), (end, _) = self._asked
        self._asked.popleft()
        ends = [span.end for span in self._done if begin <= span.begin < end]
        self._done = [span for span in self._done if span.begin >= end]
        self.ended(at - max(ends) if len(ends) >= forwards > 0 else 0.0)

    def ended(self, spare: float) -> None:
        """Takes the seconds from the end of the draft's work to the outcome, of one round; 0 if it
        was not through."""
        self._spare.append(spare)
        if self._changes and len(self._spare) == _ROUNDS:
            needed = _MARGIN + (self._delay if self.first else 0.0)
            self.first = min(self._spare) < needed
