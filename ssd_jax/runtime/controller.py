"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers. Per round and slot: look the committed tokens up among the branches
that were prepared (`propose`); a hit makes that branch the record, a miss takes the backup. When
the verification of the records is dispatched, divide the branches over the next outcomes and
expand (`speculate`). A row that misses does not touch the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import BranchingDraft, Drafted, DraftRow, Traits
from ssd_jax.runtime.speculated import Found, Speculated
from ssd_jax.speculation.backup import HostKind, make
from ssd_jax.speculation.fan_out import After, FanOut


class Controller:
    """See `roles.Drafter`.

    Args:
      draft: runs the branches.
      k: most tokens of a proposal, at most the draft's.
      budget: M, branches a slot, at most the draft's.
      fan_out: makes the policy of a sequence.
      backup: what a miss proposes; None waits for the draft.
      tokens: how many ids the tokenizer has.
      longer: one forward more, so that branches of k = L have K tokens, too.
      settle: of a draft elsewhere: gives the proposals with all their q. The round's message then
        goes out when the target's forward is dispatched, not when its verification is.
    """

    def __init__(
        self,
        draft: BranchingDraft,
        *,
        k: int,
        budget: int,
        fan_out: Callable[[], FanOut],
        backup: HostKind | None,
        tokens: int,
        longer: bool = False,
        settle: Callable[[], Any] | None = None,
    ) -> None:
        self.traits = Traits(proposes="distribution", on_device=settle is None)
        self.k = k
        self._settle = settle
        self._draft = draft
        self._budget = budget
        self._fan_out = fan_out
        self._backup: HostKind | None = backup
        self._tokens = tokens
        self._forwards = k + longer
        self._slots: dict[int, Speculated] = {}
        self._live: dict[int, Speculated] = {}  # with a record that has no branches yet
        self._expanded: dict[int, tuple[Speculated, tuple[int, ...]]] = {}  # with F_0..F_L

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Drafter.open`."""
        self._slots[slot] = Speculated(
            slot,
            k=self.k,
            budget=self._budget,
            fan_out=self._fan_out(),
            backup=make(self._backup or "none", params.seed, index, self._tokens),
            room=params.max_tokens,
        )
        # What a step that was interrupted has left behind is not to reach new requests.
        self._live = {}
        self._draft.open(slot, params, index, banned, ban_before)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`."""
        self._draft.prefill(slot, tokens, offset)
        self._slots[slot].prefill(tokens, offset, last=last)

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`."""
        self._hear()
        lengths = np.zeros(self._draft.slots, np.int32)
        waited = np.zeros(self._draft.slots, np.int32)
        found = {row.slot: self._slots[row.slot].look_up(row) for row in rows}
        for row in rows:
            if self._backup is None and found[row.slot].source != "hit":
                waited[row.slot] = row.limit
                found[row.slot] = found[row.slot]._replace(length=row.limit)
            lengths[row.slot] = found[row.slot].length
        self._move(found)
        if waited.any():
            drafted = self._draft.draft(waited, lowered=self._lowered("miss"))
            for slot in np.flatnonzero(waited):
                lengths[slot] = drafted[slot]
                self._slots[int(slot)].drafted(int(drafted[slot]))
        sources = {slot: each.source for slot, each in found.items()}
        settle = None if self._settle is None else self._settled
        return Drafted(lengths, self._draft.proposal(), sources, settle)

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`."""
        if any(each.prompted for each in self._slots.values()):
            self._move({})
        asking = {slot: each for slot, each in self._live.items() if each.asks_confidence}
        if asking:
            confidence = self._draft.confidence()
            for slot, each in asking.items():
                each.tell_confidence(confidence[slot].tolist())
        expanded = {
            slot: (each, forks)
            for slot, each in self._live.items()
            if (forks := each.forks()) is not None
        }
        self._live = {}
        if not expanded:
            return
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow = np.zeros(self._draft.slots, bool)
        for slot, (each, forks) in expanded.items():
            counts[slot, : len(forks)] = forks
            follow[slot] = not each.made
        forwards = min(self._forwards, max(each.forwards() for each, _ in expanded.values()))
        self._draft.expand(counts, follow=follow, lowered=self._lowered("hit"), forwards=forwards)
        self._expanded = expanded

    def _lowered(self, after: After) -> np.ndarray:
        """D of Saguaro sampling [B, K]; see `Speculated.lowered`."""
        lowered = np.zeros((self._draft.slots, self._draft.k), np.int32)
        for slot, each in self._slots.items():
            lowered[slot, : self.k] = each.lowered(after)
        return lowered

    def _settled(self) -> Any:
        assert self._settle is not None
        self.speculate()
        return self._settle()

    def _move(self, found: dict[int, Found]) -> None:
        """Hands all new records over; those of finished prompts among them."""
        begun = {
            slot: Found(each.prompted, 0, "cold")
            for slot, each in self._slots.items()
            if each.prompted and slot not in found
        }
        found = begun | found
        self._live, self._expanded = {}, {}
        self._draft.move([each.moved for each in found.values()])
        for slot, each in found.items():
            self._slots[slot].move(each)
            self._live[slot] = self._slots[slot]

    def _hear(self) -> None:
        """Puts what the draft has speculated into the caches."""
        if not self._expanded:
            return
        news = self._draft.news()
        expanded, self._expanded = self._expanded, {}
        for each, forks in expanded.values():
            each.hear(news, forks)
