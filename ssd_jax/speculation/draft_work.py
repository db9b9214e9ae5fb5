"""What a draft elsewhere reports of its work, and what pace and order learn of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from ssd_jax.roles.activity import FORWARDS, Activity, Busy
from ssd_jax.speculation.order import Order
from ssd_jax.speculation.pace import Pace


class DraftWork:
    """The work since the last proposal.

    Args:
      activity: returns what the draft has done since the last call; None if that is not known.
      pace, order: get what is reported.
    """

    def __init__(self, activity: Callable[[], Activity] | None, pace: Pace, order: Order) -> None:
        self._activity, self._pace, self._order = activity, pace, order
        self._gathered: list[Activity] = []
        self._branches: deque[int] = deque(maxlen=2)  # M of the last expansions
        self._forwarded: float | None = None  # when the last forward of this expansion ended

    def forget(self) -> None:
        """Keeps nothing of a round that was interrupted."""
        self._gathered = []

    def expands(self, branches: int) -> None:
        """Takes M of an expansion that was asked for."""
        self._branches.append(branches)
        self._forwarded = None

    def underway(self, now: float) -> float:
        """Seconds that the draft has been running the forward that it has not reported yet."""
        return 0.0 if self._forwarded is None else max(now - self._forwarded, 0.0)

    def gather(self) -> Sequence[Busy]:
        """Collects what has been reported; tells the pace how long each forward took."""
        if self._activity is None:
            return ()
        activity = self._activity()
        self._gathered.append(activity)
        self._order.worked(activity.spans)
        # A span belongs to the last expansion or to the one before; it does not say which.
        same = len(self._branches) == 2 and len(set(self._branches)) == 1
        branches = self._branches[-1] if same else None
        for span in activity.spans:
            if span.what in FORWARDS:
                self._pace.forward("branches", span.end - span.begin, branches)
                self._forwarded = span.end
        return activity.spans

    def taken(self, tokens: int, seconds: float) -> Activity | None:
        """Takes all that has been gathered; tells the pace the cost of just-in-time drafts.

        Args:
          tokens: most tokens that a row waited for.
          seconds: how long the controller waited for them.
        """
        if self._activity is None:
            return None
        for span in self.gather():
            if span.what == "draft" and tokens:
                busy = span.end - span.begin
                self._pace.forward("record", busy / tokens)
                self._pace.drafted(max(seconds - busy, 0.0))
        work, self._gathered = self._gathered, []
        return Activity(
            tuple(span for each in work for span in each.spans),
            sum(each.bytes for each in work),
            work[-1].round_trip,
        )
