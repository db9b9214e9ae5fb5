"""A drafter of mode sd whose K is chosen from round to round. Pure host code."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from typing_extensions import override

from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftBatch, Drafted, SlotOpening
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.fan_out import VerificationStats
from ssd_jax.speculation.tuner import Tuner, teaches


class TunedDrafter(Drafter):
    """Lets another drafter propose, at most as many tokens as the tuner says.

    A round without a proposal counts as one whose first token was rejected: so the acceptance of a
    drafter that often proposes nothing shows what its K are worth.

    Args:
      drafter: proposes.
      tuner: decides how many tokens.
      rule: of the verification.
      fixed: whether the tuner only learns, since it has one K.
    """

    def __init__(
        self, drafter: Drafter, tuner: Tuner, *, rule: str = "ratio", fixed: bool = False
    ) -> None:
        self.k, self.on_device = drafter.k, drafter.on_device
        self.timed = RULES[rule].timed and not fixed
        self.asks_first = drafter.asks_first
        self.set_pages = drafter.set_pages
        self.gather = drafter.gather
        self.speculate, self.proposal = drafter.speculate, drafter.proposal
        self._drafter, self._tuner, self._rule = drafter, tuner, rule
        self._teaching: dict[int, bool] = {}  # by slot
        self._lengths: dict[int, int] = {}  # L by slot, where a verification is under way

    @override
    def open(self, opening: SlotOpening) -> None:
        self._lengths.pop(opening.slot, None)
        self._teaching[opening.slot] = teaches(opening.params.temperature, self._rule)
        self._drafter.open(opening)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        self._lengths.pop(slot, None)  # what follows is no outcome of a proposal
        self._drafter.prefill(slot, tokens, offset, last=last)

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        """Proposes at most as many tokens as the tuner's plan has."""
        for slot in batch.slots:
            length = self._lengths.pop(slot, None)
            if length is not None and self._teaching[slot]:
                accepted = min(int(batch.counts[slot]) - 1, length)
                self._tuner.observe(VerificationStats(accepted, max(length, 1), "miss"))
        k = self._tuner.plan(rows=len(batch.slots), steps=dict).k
        drafted = self._drafter.propose(batch._replace(limit=np.minimum(batch.limit, k)))
        self._lengths |= {slot: int(drafted.lengths[slot]) for slot in batch.slots}
        return drafted
