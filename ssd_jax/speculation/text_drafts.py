"""Drafts that read the text alone: what proposes for one sequence, and the drafter of all of them.

Each of `TEXT_DRAFTS` is a value of `draft`. Pure host code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

import numpy as np
from typing_extensions import override

from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftBatch, Drafted, DraftSetup, SlotOpening
from ssd_jax.speculation.ngram import NgramIndex


class TextDraft(Protocol):
    """Proposes for one sequence; a new request gets a new one."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Takes tokens of the prompt, then committed ones; each comes once."""
        ...

    def propose(self, count: int) -> Sequence[int]:
        """Up to `count` tokens that may follow; none if there is nothing to propose."""
        ...


class BuiltInDraft(NamedTuple):
    """A draft that has a name.

    Attributes:
      make: makes the draft of a sequence.
      k: the default K.
      acceptance: the rate that `auto` expects before any observation; a round without a proposal
        counts as rejected.
    """

    make: Callable[[], TextDraft]
    k: int
    acceptance: float


TEXT_DRAFTS: Mapping[str, BuiltInDraft] = {"ngram": BuiltInDraft(NgramIndex, k=8, acceptance=0.4)}


class TextDrafter(Drafter):
    """Proposes for each sequence by a draft of its own.

    Args:
      make: makes the draft of a sequence.
    """

    def __init__(self, make: Callable[[], TextDraft], setup: DraftSetup) -> None:
        self.k = setup.k
        self._make = make
        self._drafts = [make() for _ in range(setup.slots)]
        self._lengths = [0] * setup.slots  # of the texts so far

    @override
    def open(self, opening: SlotOpening) -> None:
        self._drafts[opening.slot], self._lengths[opening.slot] = self._make(), 0

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        self._extend(slot, tokens, offset + len(tokens))

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        slots = len(self._drafts)
        tokens, lengths = np.zeros((slots, self.k), np.int32), np.zeros(slots, np.int32)
        for slot in batch.slots:
            committed = batch.tokens[slot, : batch.counts[slot]].tolist()
            self._extend(slot, committed, int(batch.position[slot]) + 1)
            proposed = self._drafts[slot].propose(int(batch.limit[slot]))
            lengths[slot] = len(proposed)
            tokens[slot, : len(proposed)] = proposed
        return Drafted(lengths, tokens)

    def _extend(self, slot: int, tokens: Sequence[int], end: int) -> None:
        """Adds the last tokens of a text of `end` tokens; an interrupted step repeats its own."""
        new = end - self._lengths[slot]
        if new > 0:
            self._drafts[slot].extend(tokens[-new:])
            self._lengths[slot] = end
