"""Decides by measured goodput whether rounds use the draft. Pure host code.

Goodput is tokens per second of all requests together. It depends on the text and on the number of
requests, so both ways of decoding are timed where they run: the faster one runs, and the other is
tried for a few rounds now and then.
"""

from __future__ import annotations

from collections import defaultdict

from typing_extensions import override

from ssd_jax.engine.planner import Planner
from ssd_jax.engine.round_timer import TimedRound

TRIAL = 8
"""Timed rounds of a trial."""
INTERVALS = (32, 4096)
"""Rounds between trials, at first and at most: each trial that changes nothing doubles them."""
_LONGEST_TRIAL = 64  # rounds in all, where few of them can be timed
_LEAST = 4  # timed rounds of a way of decoding, to judge it by
_GAIN = 1.03  # a way that is faster by less is not taken for it
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
      drafts: whether the draft is used but for trials.
      trying: whether a trial is under way.
    """

    def __init__(self) -> None:
        self.drafts, self.trying = True, False
        self._goodput = {True: _Goodput(), False: _Goodput()}  # with the draft, and without
        self._interval, self._rounds = INTERVALS[0], 0

    def next_round(self) -> bool:
        """Whether the next round uses the draft."""
        self._rounds += 1
        tried = self._goodput[not self.drafts]
        if self.trying and (tried.count >= TRIAL or self._rounds > _LONGEST_TRIAL):
            self.trying, self._rounds = False, 0
            if tried.beats(self._goodput[self.drafts]):
                self.drafts, self._interval = not self.drafts, INTERVALS[0]
            else:
                self._interval = min(2 * self._interval, INTERVALS[1])
        elif not self.trying and self._rounds > self._interval:
            self.trying, self._rounds = True, 0
            self._goodput[not self.drafts] = _Goodput()
        return self.drafts != self.trying

    def observe(self, round_: TimedRound, *, drafts: bool) -> None:
        """Learns from a round with the draft or without."""
        self._goodput[drafts].observe(round_)


class GoodputPlanner(Planner):
    """Chooses between K proposed tokens and none, for each size of a batch; it begins with K.

    Sizes are powers of two: batches with fewer requests than a size, and more than half of it,
    are timed together.

    Args:
      k: most proposed tokens a round.
      timed: see `Planner`.
    """

    def __init__(self, k: int, *, timed: bool) -> None:
        self.timed = timed
        self._k = k
        self._choices: defaultdict[int, _Choice] = defaultdict(_Choice)  # by bits of the size

    @override
    def most_proposed(self, rows: int) -> int:
        return self._k if self._choices[_bits(rows)].next_round() else 0

    def observe(self, round_: TimedRound) -> None:
        """Learns from a round that followed another of the same requests."""
        drafts = round_.proposed > 0 or round_.missed
        if drafts or not round_.speculates:  # else the draft catches up, or texts end
            self._choices[_bits(round_.rows)].observe(round_, drafts=drafts)


def _bits(rows: int) -> int:
    return max(rows - 1, 0).bit_length()
