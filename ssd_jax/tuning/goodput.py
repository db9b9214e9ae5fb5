"""Decides by measured goodput how rounds speculate. Pure host code.

Goodput is tokens per second of all requests together. It depends on the text and on the number of
requests, so all plans are timed where they run: the fastest one runs, and another is tried for a
few rounds now and then.
"""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from ssd_jax.engine.planner import Planner, RoundPlan
from ssd_jax.engine.round_timer import TimedRound

TRIAL = 8
"""Timed rounds of a trial."""
INTERVALS = (32, 4096)
"""Rounds between trials, at first and at most: trials of all plans that change nothing double
them."""
_LONGEST_TRIAL = 64  # rounds in all, where few of them can be timed
_LEAST = 4  # timed rounds of a plan, to judge it by
_GAIN = 1.03  # a plan that is faster by less is not taken for it
_DECAY = 31 / 32  # of what a round counts, with each further one


class _Goodput:
    """Tokens and seconds of recent rounds."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.count = 0

    def observe(self, round_: TimedRound) -> None:
        self.tokens = _DECAY * self.tokens + round_.tokens
        self.seconds = _DECAY * self.seconds + round_.seconds
        self.count += 1

    def beats(self, other: _Goodput) -> bool:
        """Whether it is faster by enough."""
        if min(self.count, other.count) < _LEAST:
            return False
        return self.tokens * other.seconds > _GAIN * other.tokens * self.seconds


class _Choice:
    """The choice for a number of requests.

    Attributes:
      best: number of the plan that is used but for trials.
    """

    def __init__(self, plans: int) -> None:
        self.best = 0
        self._goodput = [_Goodput() for _ in range(plans)]
        self._trial: int | None = None  # number of the plan that is tried
        self._untried: list[int] = []
        self._interval, self._rounds = INTERVALS[0] // 2, 0

    def next_round(self) -> int:
        """Number of the next round's plan."""
        self._rounds += 1
        if self._trial is not None:
            tried = self._goodput[self._trial]
            if tried.count >= TRIAL or self._rounds > _LONGEST_TRIAL:
                if tried.beats(self._goodput[self.best]):
                    self.best, self._untried = self._trial, []
                    self._interval = INTERVALS[0] // 2
                self._trial, self._rounds = None, 0
        elif self._rounds > self._next_interval():
            self._trial, self._rounds = self._untried.pop(), 0
            self._goodput[self._trial] = _Goodput()
        return self.best if self._trial is None else self._trial

    def _next_interval(self) -> int:
        """Rounds before the next trial; all other plans are tried before it grows."""
        if not self._untried:
            self._untried = [n for n in range(len(self._goodput)) if n != self.best]
            self._interval = min(2 * self._interval, INTERVALS[1])
        return self._interval

    def observe(self, plan: int, round_: TimedRound) -> None:
        """Learns from a round of a plan."""
        self._goodput[plan].observe(round_)


class GoodputPlanner(Planner):
    """Chooses among plans, for each size of a batch; it begins with the first.

    Sizes are powers of two: batches with fewer requests than a size, and more than half of it,
    are timed together.

    Args:
      plans: of different modes.
      timed: see `Planner`.
    """

    def __init__(self, plans: Sequence[RoundPlan], *, timed: bool) -> None:
        self.timed = timed
        self._plans = tuple(plans)
        self._numbers = {plan.mode: number for number, plan in enumerate(plans)}
        self._choices: dict[int, _Choice] = {}  # by bits of the size

    @override
    def plan(self, rows: int) -> RoundPlan:
        return self._plans[self._choice(rows).next_round()]

    def observe(self, round_: TimedRound) -> None:
        """Learns from a round that followed another of the same requests."""
        number = self._numbers.get(round_.mode)
        drafts = round_.proposed > 0 or round_.missed
        if number is not None and (drafts or round_.mode == "ar"):  # else the draft catches up
            self._choice(round_.rows).observe(number, round_)

    def _choice(self, rows: int) -> _Choice:
        return self._choices.setdefault(max(rows - 1, 0).bit_length(), _Choice(len(self._plans)))
