"""A drafter of mode sd whose K is chosen from round to round. Pure host code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Drafted, Drafter, DraftRow
from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.speculation.tuner import Tuner, teaches


class TunedDrafter:
    """See `roles.Drafter`: lets another propose, at most as many tokens as the tuner says.

    A round without a proposal counts as one whose first token was rejected: so the acceptance of a
    drafter that often has nothing to say is what its K are worth.

    Args:
      drafter: proposes.
      tuner: decides how many tokens.
      rule: of the verification, "ratio" or "coupled".
    """

    def __init__(self, drafter: Drafter, tuner: Tuner, *, rule: str = "ratio") -> None:
        self.traits = dataclasses.replace(drafter.traits, timed=rule == "ratio")
        self.k = drafter.k
        self._drafter, self._tuner, self._rule = drafter, tuner, rule
        self._teaching: dict[int, bool] = {}  # by slot
        self._lengths: dict[int, int] = {}  # L by slot, where a verification is under way

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Drafter.open`."""
        self._lengths.pop(slot, None)
        self._teaching[slot] = teaches(params.temperature, self._rule)
        self._drafter.open(slot, params, index, banned, ban_before)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`."""
        self._drafter.prefill(slot, tokens, offset, last=last)

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`."""
        self._drafter.speculate()

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`."""
        for row in rows:
            length = self._lengths.pop(row.slot, None)
            if length is not None and self._teaching[row.slot]:
                accepted = min(len(row.committed) - 1, length)
                self._tuner.observe(VerificationStats(accepted, max(length, 1), "miss"))
        k = self._tuner.plan(rows=len(rows), steps=dict).k
        drafted = self._drafter.propose(
            [dataclasses.replace(row, limit=min(row.limit, k)) for row in rows]
        )
        self._lengths |= {row.slot: int(drafted.lengths[row.slot]) for row in rows}
        return drafted
