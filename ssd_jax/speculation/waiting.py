"""What a round waits for: times of rounds and forwards, and what a draft reports of its work."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from ssd_jax.roles.activity import FORWARDS, Activity
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.sequence_state import RoundState


class Waiting:
    """Decides how many forwards of a draft elsewhere are waited for.

    Args:
      activity: returns what the draft has done since the last call. None where that is not known:
        rounds then wait for all that they can.
      pace: weighs tokens against seconds.
      clock: seconds, monotonic.

    Attributes:
      by_clock: whether times decide.
      pace, clock: see above.
    """

    def __init__(
        self,
        activity: Callable[[], Activity] | None = None,
        *,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.by_clock = activity is not None or pace is not None
        self.pace, self.clock = pace or Pace(), clock
        self._activity = activity
        self._reports: list[Activity] = []  # since the last proposal
        self._branches: deque[int] = deque(maxlen=2)  # M of the last expansions
        self._forwarded: float | None = None  # when the last forward of this expansion ended

    def forget(self) -> None:
        """Keeps nothing of a round that was interrupted."""
        self._reports = []

    def steps(self) -> Mapping[int, float]:
        """Seconds of a forward of M branches, by M, as far as they are known."""
        return self.pace.steps()

    def expands(self, branches: int) -> None:
        """Takes M of an expansion that was asked for."""
        self._branches.append(branches)
        self._forwarded = None

    def more_forwards(self, this_round: RoundState, missing: Mapping[int, int]) -> int:
        """Number of forwards of the branches to wait for.

        Args:
          missing: tokens that each row's branch may still get, by slot.
        """
        self.gather()
        expected = [
            state.expected(
                int(this_round.lengths[slot]), missing[slot], this_round.confidence.get(slot, ())
            )
            for slot, state in this_round.states.items()
        ]
        last = self._forwarded
        underway = 0.0 if last is None else max(self.clock() - last, 0.0)
        return self.pace.worth("branches", expected, this_round.usual(), underway=underway)

    def just_in_time(self, this_round: RoundState, missed: Sequence[int]) -> int:
        """Number of forwards to wait for, that draft records of rows that missed."""
        worth = [this_round.states[slot].worth(int(this_round.limit[slot])) for slot in missed]
        return self.pace.worth("record", worth, this_round.usual())

    def gather(self) -> None:
        """Collects what the draft reports, and tells the pace how long each forward took."""
        if self._activity is None:
            return
        report = self._activity()
        self._reports.append(report)
        # A span belongs to the last expansion or to the one before; it does not say which.
        same = len(self._branches) == 2 and len(set(self._branches)) == 1
        branches = self._branches[-1] if same else None
        for span in report.spans:
            if span.kind in FORWARDS:
                self.pace.forward("branches", span.end - span.begin, branches)
                self._forwarded = span.end

    def report(self, tokens: int, seconds: float) -> Activity | None:
        """All that the draft has reported; tells the pace the cost of just-in-time drafts.

        Args:
          tokens: most tokens that a row waited for.
          seconds: how long the round waited for them.
        """
        if self._activity is None:
            return None
        before = len(self._reports)
        self.gather()
        for span in (span for report in self._reports[before:] for span in report.spans):
            if span.kind == "draft" and tokens:
                busy = span.end - span.begin
                self.pace.forward("record", busy / tokens)
                self.pace.drafted(max(seconds - busy, 0.0))
        reports, self._reports = self._reports, []
        return Activity(
            tuple(span for report in reports for span in report.spans),
            sum(report.bytes for report in reports),
            reports[-1].round_trip,
        )
