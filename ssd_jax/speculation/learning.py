"""What SSD learns of verified outcomes: the sequences' statistics and policies, and the tuner."""

from __future__ import annotations

from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.speculation.sequence_state import RoundState, SequenceState
from ssd_jax.speculation.tuner import SpeculationPlan, Tuner
from ssd_jax.speculation.waiting import Waiting


class Learning:
    """Reports ended rounds to the pace, to rows and their policies, and to the tuner.

    Args:
      tuner: decides K and M.
      waiting: has the pace.

    Attributes:
      next_plan: of the next round.
    """

    def __init__(self, tuner: Tuner, waiting: Waiting) -> None:
        self._tuner, self._waiting = tuner, waiting
        self._unobserved: list[VerificationStats] = []  # by the tuner
        self._last: dict[int, SequenceState] = {}  # rows of the last round, which began at `_began`
        self._began = 0.0
        self.next_plan: SpeculationPlan = tuner.plan(rows=1, steps=waiting.steps)

    def forget(self, slot: int) -> None:
        """A row's next round does not follow its last one."""
        self._last.pop(slot, None)

    def plan(self, rows: int) -> None:
        """Plans the next round of so many rows, by all that was learned."""
        for verified in self._unobserved:
            self._tuner.observe(verified)
        self._unobserved.clear()
        self.next_plan = self._tuner.plan(rows=rows, steps=self._waiting.steps)

    def learn(self, this_round: RoundState) -> None:
        """Learns from the outcomes that a round began with, before its rows have new records.

        It does so once, however often it is called.
        """
        if this_round.learned:
            return
        this_round.learned = True
        batch, lookup = this_round.batch, this_round.lookup
        last, self._last = self._last, this_round.states
        if any(last.get(slot) is state for slot, state in this_round.states.items()):
            self._waiting.pace.round(this_round.began - self._began)
        self._began = this_round.began
        for slot, state in this_round.states.items():
            state.room = int(batch.room[slot])
            hit, count = lookup.branch[slot] >= 0, int(batch.counts[slot])
            if last.get(slot) is state and slot in this_round.sources:
                after_hit, empty = state.after == "hit", not state.length
                state.stats.round(count, hit=after_hit, empty=empty, prepared=hit)
            if lookup.k[slot] < 0:
                continue
            if state.length:
                state.stats.observe(count - 1, state.length, state.confidence)
            rank = int(lookup.rank[slot]) if hit else None
            verified = state.verified(count - 1, int(lookup.prepared[slot]), rank)
            state.fan_out.observe(verified)
            if state.teaches:
                self._unobserved.append(verified)
