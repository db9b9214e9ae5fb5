"""How long to wait for a draft: what its next tokens are worth against the time they take.

A round that waits for one more draft forward may commit more tokens, and the seconds it waits could
have committed tokens elsewhere, at the rate that decoding has had lately. Waiting pays while the
first is more. The decision looks at times, lengths and acceptance so far, never at the tokens that
it would keep or drop, so the length of a proposal is a stopping time. Pure host code.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Literal

import numpy as np

Work = Literal["branches", "record"]
"""A draft forward of all branches, or of the records that are drafted just in time."""

_MEMORY = 32
_FIRST_GUESS, _WEIGHT = 0.8, 8.0
_LIMITS = (0.01, 0.99)


class Acceptance:
    """The chance that a proposed token is accepted if those before it are, of one sequence.

    It starts at 0.8, worth 8 tokens.
    """

    def __init__(self) -> None:
        self._accepted, self._judged = _FIRST_GUESS * _WEIGHT, _WEIGHT

    def observe(self, accepted: int, length: int) -> None:
        """Takes a verification; tokens after the first rejected one were not judged."""
        self._accepted += accepted
        self._judged += min(accepted + 1, length)

    def tokens(self, length: int) -> float:
        """Expected tokens of a round with `length` proposed ones, bonus included: 1 + a + ..."""
        low, high = _LIMITS
        a = min(max(self._accepted / self._judged, low), high)
        return sum(a**i for i in range(length + 1))


class Pace:
    """Speeds of the last rounds and forwards; until both are known, waiting always pays."""

    def __init__(self) -> None:
        self._looks: dict[bool, deque[bool]] = {
            empty: deque([True], maxlen=_MEMORY) for empty in (True, False)
        }
        self._after: dict[bool, deque[int]] = {hit: deque(maxlen=_MEMORY) for hit in (True, False)}
        self._rounds: deque[tuple[int, float]] = deque(maxlen=_MEMORY)
        self._forwards: dict[Work, deque[float]] = {
            "branches": deque(maxlen=_MEMORY),
            "record": deque(maxlen=_MEMORY),
        }
        self._steps: dict[int, deque[float]] = {}

    def round(self, tokens: int, seconds: float) -> None:
        """Takes a round: tokens committed by all rows, from its beginning to the next one's."""
        self._rounds.append((tokens, seconds))

    def look(self, *, empty: bool, hit: bool) -> None:
        """Takes a look-up of an outcome, and whether nothing had been proposed to verify."""
        self._looks[empty].append(hit)

    def committed(self, tokens: int, *, hit: bool) -> None:
        """Takes the tokens of a row's round, and whether its proposal was a hit."""
        self._after[hit].append(tokens)

    def next_round(self, *, empty: bool) -> float:
        """Tokens that the next round of a row is expected to gain by a hit, after a round that
        verifies nothing (all of its branches are then for one token) or something."""
        hit, other = (self._after[kind] for kind in (True, False))
        if not hit or not other:
            return 0.0
        gain = float(np.mean(hit)) - float(np.mean(other))
        return max(gain, 0.0) * float(np.mean(self._looks[empty]))

    def forward(self, work: Work, seconds: float, branches: int | None = None) -> None:
        """Takes a draft forward, of M branches a sequence where that is known."""
        self._forwards[work].append(seconds)
        if branches is not None:
            self._steps.setdefault(branches, deque(maxlen=_MEMORY)).append(seconds)

    def steps(self) -> dict[int, float]:
        """Seconds of a forward of M branches, by M."""
        return {branches: float(np.median(each)) for branches, each in self._steps.items()}

    def worth(self, work: Work, tokens: Sequence[Sequence[float]]) -> int:
        """How many forwards to wait for.

        Args:
          work: what they run.
          tokens: for each row, the tokens that its round is expected to commit after 0, 1, ...
            forwards; with more than a row's last entry it stays there.
        """
        most = max((len(row) - 1 for row in tokens), default=0)
        seconds = sum(seconds for _, seconds in self._rounds)
        if not most or not seconds or not self._forwards[work]:
            return most
        rate = sum(count for count, _ in self._rounds) / seconds
        price = rate * float(np.median(self._forwards[work]))
        totals = [sum(row[min(n, len(row) - 1)] for row in tokens) for n in range(most + 1)]
        return int(np.argmax([total - n * price for n, total in enumerate(totals)]))
