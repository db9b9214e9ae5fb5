"""The time axis of a picture, with long gaps cut out."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np


class TimeAxis:
    """Maps times to places on an axis that leaves out most of each long gap.

    Args:
      spans: begin and end of everything that is drawn; a gap is a time within none of them.
      longest: a longer gap is cut.
      remaining: what is left of a gap that is cut.
    """

    def __init__(
        self, spans: Iterable[tuple[float, float]], *, longest: float, remaining: float
    ) -> None:
        self._cuts: list[tuple[float, float]] = []  # the parts that are left out
        covered_until = None
        for begin, end in sorted(spans):
            if covered_until is not None and begin - covered_until > longest:
                self._cuts.append((covered_until + remaining / 2, begin - remaining / 2))
            covered_until = end if covered_until is None else max(covered_until, end)
        self._begins = np.array([begin for begin, _ in self._cuts])
        self._lengths = np.array([end - begin for begin, end in self._cuts])

    def position(self, time: float) -> float:
        """The place of a time."""
        return time - float(np.clip(time - self._begins, 0, self._lengths).sum())

    @property
    def cuts(self) -> list[tuple[float, float]]:
        """The place of each cut, and the time that it leaves out."""
        return [(self.position(begin), end - begin) for begin, end in self._cuts]

    @property
    def left_out(self) -> float:
        """The time that all cuts leave out."""
        return float(self._lengths.sum())
