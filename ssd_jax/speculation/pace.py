"""Decides how long to wait for a draft: the worth of its next tokens against the time they take.

A round that waits for one more draft forward may commit more tokens, but the seconds it waits could
have committed tokens at the recent rate of decoding. Waiting pays while the first number is larger.
The decision depends on times, lengths and acceptance so far, never on the tokens that it would keep
or drop, so the length of a proposal is a stopping time. It depends on all rows of a batch, and
times reflect earlier acceptance: no two requests whose lengths it decides may share noise
(`engine.occurrences`). Pure host code.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence
from statistics import median
from typing import Literal

Work = Literal["branches", "record"]
"""A draft forward: of all branches, or of the records that are drafted just in time."""

_MEMORY = 32
_OLD = 64  # rounds after which a speed that was not measured again is forgotten


def _recent() -> deque[float]:
    return deque(maxlen=_MEMORY)


class Pace:
    """Seconds of the last rounds and forwards; until both are known, waiting always pays."""

    def __init__(self) -> None:
        self._rounds = _recent()
        self._forwards: defaultdict[Work, deque[float]] = defaultdict(_recent)
        self._delays = _recent()
        self._since = 0  # rounds without a record that was drafted just in time
        self._steps: defaultdict[int, deque[float]] = defaultdict(_recent)  # by M

    def round(self, seconds: float) -> None:
        """Takes the seconds of a round, from its beginning to the next round's."""
        self._rounds.append(seconds)
        self._since += 1
        if self._since > _OLD:  # else a draft that was slow once would never be tried again
            self._forwards["record"].clear()
            self._delays.clear()

    def forward(self, work: Work, seconds: float, branches: int | None = None) -> None:
        """Takes the seconds of a draft forward, with M branches a sequence where that is known."""
        self._forwards[work].append(seconds)
        if branches is not None:
            self._steps[branches].append(seconds)

    def drafted(self, delay: float) -> None:
        """Takes the seconds that a just-in-time draft took beside its forwards.

        They are the way there and back, and the rest of the draft's work under way.
        """
        self._delays.append(delay)
        self._since = 0

    def steps(self) -> dict[int, float]:
        """Median seconds of a forward of M branches, by M."""
        return {branches: median(seconds) for branches, seconds in self._steps.items()}

    def worth(
        self,
        work: Work,
        tokens: Sequence[Sequence[float]],
        usual: float,
        *,
        underway: float = 0.0,
    ) -> int:
        """Number of forwards to wait for.

        Args:
          work: kind of the forwards.
          tokens: for each row, the tokens that its round is expected to commit after 0, 1, ...
            forwards; further forwards leave it at the row's last entry.
          usual: tokens that a round of all rows has committed lately.
          underway: seconds that the first of the forwards has been running already.
        """
        longest = max((len(row) - 1 for row in tokens), default=0)
        if not longest or not self._rounds or not self._forwards[work]:
            return longest
        rate = usual / median(self._rounds)
        forward = median(self._forwards[work])
        delay = median(self._delays) if work == "record" and self._delays else 0.0
        remaining = max(forward - underway, 0.0)
        seconds = [0.0, *(remaining + n * forward + delay for n in range(longest))]
        gains = [sum(row[min(n, len(row) - 1)] for row in tokens) for n in range(longest + 1)]
        values = [gain - rate * waited for gain, waited in zip(gains, seconds, strict=True)]
        return values.index(max(values))
