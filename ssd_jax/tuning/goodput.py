"""Decides by measured goodput how rounds speculate. Pure host code.

Goodput is tokens per second of a request. It depends on the text and on the batch that rounds run,
so all plans are timed where they run: the fastest one runs, and another is tried for a few rounds
now and then. What trials lose is bounded: the next one waits until its time is a small
share of the time since.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from typing_extensions import override

from ssd_jax.engine.planner import Planner, RoundPlan
from ssd_jax.engine.rounds.timer import TimedRound

TRIAL = 8
"""Timed rounds of a trial."""
INTERVAL = 32
"""Fewest rounds between trials."""
LOSS = 0.01
"""Share of the time that trials of slower plans may cost."""
_LONGEST_TRIAL = 64  # rounds in all, where few of them can be timed
_LEAST = 4  # timed rounds of a plan, to judge it by
_GAIN = 1.03  # a plan that is faster by less is not taken for it
_HOPELESS = 1.25  # a trial of a plan that is slower by more ends at once
_DECAY = 31 / 32  # of what a round counts, with each further one


class _Goodput:
    """Tokens of a request, and seconds, of recent rounds with the programs of a batch size."""

    def __init__(self) -> None:
        self.tokens = self.seconds = 0.0
        self.count = self._batch = 0

    def observe(self, round_: TimedRound) -> bool:
        """Learns from a round; returns whether all before it were of another batch size."""
        is_new = self.count > 0 and round_.batch != self._batch
        if is_new:
            self.tokens = self.seconds = 0.0
            self.count = 0
        self._batch = round_.batch
        self.tokens = _DECAY * self.tokens + round_.tokens / round_.rows
        self.seconds = _DECAY * self.seconds + round_.seconds
        self.count += 1
        return is_new

    def beats(self, other: _Goodput, gain: float = _GAIN) -> bool:
        """Whether it is faster by enough, as far as both ran as many slots."""
        if min(self.count, other.count) < _LEAST or self._batch != other._batch:
            return False
        return self.tokens * other.seconds > gain * other.tokens * self.seconds

    def lead(self, round_: TimedRound) -> float:
        """Seconds that a round took longer than the same tokens take at this goodput."""
        if not self.tokens:
            return 0.0
        return round_.seconds - round_.tokens / round_.rows * self.seconds / self.tokens


class _Choice:
    """The choice for a number of slots.

    Attributes:
      best: number of the plan that is used but for trials.
    """

    def __init__(self, plans: int, best: int) -> None:
        self.best = best
        self._goodput = [_Goodput() for _ in range(plans)]
        self._trial: int | None = None  # number of the plan that is tried
        self._untried: list[int] = []
        self._rounds = 0  # since a trial began or ended
        self._loss = 0.0  # seconds that trials lost and that time has not made good

    def next_round(self) -> int:
        """Number of the next round's plan."""
        self._rounds += 1
        if self._trial is not None:
            if self._decided(self._goodput[self._trial]):
                self._trial, self._rounds = None, 0
        elif self._rounds > INTERVAL and self._loss <= 0:
            self._begin_trial()
        return self.best if self._trial is None else self._trial

    def _begin_trial(self) -> None:
        """Tries the plan whose trial is the longest ago."""
        if not self._untried:
            self._untried = [n for n in range(len(self._goodput)) if n != self.best]
        self._trial, self._rounds = self._untried.pop(), 0
        self._goodput[self._trial] = _Goodput()

    def _decided(self, tried: _Goodput) -> bool:
        """Whether the trial is over; takes the plan if it is faster."""
        best = self._goodput[self.best]
        if best.beats(tried, _HOPELESS):
            return True
        if tried.count < TRIAL and self._rounds <= _LONGEST_TRIAL:
            return False
        if tried.beats(best) and self._trial is not None:
            self.best, self._untried, self._loss = self._trial, [], 0.0
        return True

    def observe(self, plan: int, round_: TimedRound, *, drafts: bool) -> None:
        """Learns from a round of a plan, which it says nothing of where the draft catches up."""
        if plan == self.best and drafts:
            self._loss = max(self._loss - LOSS * round_.seconds, 0.0)
        else:
            self._loss += self._goodput[self.best].lead(round_)
        if drafts and self._goodput[plan].observe(round_):
            # What was found with programs of other sizes counts no more.
            self._untried, self._loss, self._rounds = [], 0.0, 0


class GoodputPlanner(Planner):
    """Chooses among plans, for each batch size.

    Sizes are powers of two: rounds that reach fewer slots than a size, and more than half of it,
    are timed together. Programs of a size may come while rounds run; what a plan took with others
    counts no more.

    Args:
      plans: of different modes.
      timed: see `Planner`.
      first: number of the plan that a size begins with; the first of all without it.
    """

    def __init__(
        self,
        plans: Sequence[RoundPlan],
        *,
        timed: bool,
        first: Callable[[int], int] = lambda _size: 0,
    ) -> None:
        self.timed = timed
        self._plans, self._first = tuple(plans), first
        self._numbers = {plan.mode: number for number, plan in enumerate(plans)}
        self._choices: dict[int, _Choice] = {}  # by size

    @override
    def plan(self, reach: int) -> RoundPlan:
        return self._plans[self._choice(reach).next_round()]

    def observe(self, round_: TimedRound) -> None:
        """Learns from a round that followed another of the same requests."""
        number = self._numbers.get(round_.mode)
        if number is not None:
            drafts = round_.proposed > 0 or round_.missed or round_.mode == "ar"
            self._choice(round_.reach).observe(number, round_, drafts=drafts)

    def _choice(self, reach: int) -> _Choice:
        size = 1 << max(reach - 1, 0).bit_length()
        if size not in self._choices:
            self._choices[size] = _Choice(len(self._plans), self._first(size))
        return self._choices[size]
