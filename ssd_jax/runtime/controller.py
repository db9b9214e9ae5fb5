"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers. Per round and slot: look the committed tokens up among the branches
that were prepared (`propose`); a hit makes that branch the record, a miss takes the backup. When
the verification of the records is dispatched, divide the branches over the next outcomes and
expand (`speculate`). A row that misses does not touch the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Absence, BranchingDraft, Drafted, DraftRow, Moved, News, Traits
from ssd_jax.speculation.backup import Backup, Kind, make
from ssd_jax.speculation.cache import Entry, SpeculationCache
from ssd_jax.speculation.fan_out import After, FanOut


@dataclasses.dataclass(kw_only=True)
class _Slot:
    """A sequence and the record of it that is verified next.

    Attributes:
      backup: without a draft.
      cache: branches; None until the whole prompt is known.
      start: position of the record's pending token.
      length: L.
      after: where the record came from.
      made: by the draft; it need not run its tokens.
      absent: why the draft had no news of it; None where it had.
    """

    backup: Backup
    cache: SpeculationCache | None = None
    start: int = 0
    length: int = 0
    after: After = "miss"
    made: bool = True
    absent: Absence | None = None


class Controller:
    """See `roles.Drafter`.

    Args:
      draft: runs the branches.
      k: most tokens of a proposal, at most the draft's.
      budget: M, branches a slot, at most the draft's.
      fan_out: divides them.
      backup: what a miss proposes: "draft" waits for the draft.
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
        fan_out: FanOut,
        backup: Kind,
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
        self._backup: Kind = backup
        self._tokens = tokens
        self._forwards = k + longer
        self._slots: dict[int, _Slot] = {}
        self._moves: list[Moved] = []  # of sequences whose prompt has just ended
        self._live: dict[int, _Slot] = {}  # with a record
        self._expanded: dict[int, tuple[_Slot, tuple[int, ...]]] = {}  # with F_0..F_L

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Drafter.open`."""
        kind = "none" if self._backup in ("draft", "auto") else self._backup
        self._slots[slot] = _Slot(backup=make(kind, params.seed, index, self._tokens))
        # What a step that was interrupted has left behind is not to reach new requests.
        self._moves, self._live = [], {}
        self._draft.open(slot, params, index, banned, ban_before)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`. The prompt is a verification with L = 0: its outcome is the
        first token."""
        state = self._slots[slot]
        self._draft.prefill(slot, tokens, offset)
        state.backup.extend(tokens)
        if last:
            state.start = offset + len(tokens) - 1
            state.cache = SpeculationCache(state.start)
            self._moves.append(Moved(slot=slot, position=state.start, pending=tokens[-1]))

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`."""
        self._hear()
        lengths = np.zeros(self._draft.slots, np.int32)
        waited = np.zeros(self._draft.slots, np.int32)
        sources, moves = {}, []
        for row in rows:
            moved, length, sources[row.slot] = self._look_up(row)
            if self._backup == "draft" and moved.winner < 0:
                length = waited[row.slot] = row.limit
            state = self._slots[row.slot]
            state.length, state.start = length, row.position
            state.after = "hit" if moved.winner >= 0 else "miss"
            state.made = not moved.tokens
            lengths[row.slot] = length
            moves.append(moved)
        self._move(moves)
        if waited.any():
            drafted = self._draft.draft(waited, lowered=self._lowered())
            for row in rows:
                if waited[row.slot]:
                    length = lengths[row.slot] = drafted[row.slot]
                    self._slots[row.slot].length = int(length)
        settle = None if self._settle is None else self._settled
        return Drafted(lengths, self._draft.proposal(), sources, settle)

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`."""
        if self._moves:
            self._move([])
        if not self._live:
            return
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow = np.zeros(self._draft.slots, bool)
        expanded = {}
        for slot, state in self._live.items():
            forks = self._fan_out.counts(state.length, self._budget, state.after)
            counts[slot, : len(forks)] = forks
            follow[slot] = not state.made
            expanded[slot] = (state, forks)
        self._live = {}
        self._draft.expand(counts, follow=follow, lowered=self._lowered(), forwards=self._forwards)
        self._expanded = expanded

    def _lowered(self) -> np.ndarray:
        """D of Saguaro sampling: branches planned for each place, and the token drafted there."""
        lowered = np.zeros(self._draft.k, np.int32)
        lowered[: self.k] = (
            np.array(self._fan_out.counts(self.k, self._budget, "hit")[: self.k]) + 1
        )
        return lowered

    def _settled(self) -> Any:
        assert self._settle is not None
        self.speculate()
        return self._settle()

    def _move(self, moves: list[Moved]) -> None:
        """Hands all new records over; those of finished prompts among them."""
        moves = moves + self._moves
        self._moves, self._expanded = [], {}
        self._draft.move(moves)
        self._live = {moved.slot: self._slots[moved.slot] for moved in moves}

    def _look_up(self, row: DraftRow) -> tuple[Moved, int, str]:
        """How a slot's record goes on, its L, and "hit" or the cause of a fallback: "cold" where
        nothing was prepared, "miss" where nothing for this outcome, "late" where too late."""
        state = self._slots[row.slot]
        assert state.cache is not None
        if state.length:
            self._fan_out.observe(len(row.committed) - 1, state.length, state.after)
        state.backup.extend(row.committed)
        prepared = state.cache.prepared(state.start)
        state.cache.advance(row.committed)
        hit = state.cache.find()
        moved = Moved(
            slot=row.slot,
            position=row.position,
            pending=row.committed[-1],
            committed=row.committed,
        )
        if hit is not None and prepared and not hit.used:
            won = dataclasses.replace(moved, winner=hit.entry.row, limit=row.limit)
            return won, min(len(hit.entry.tokens), row.limit), "hit"
        # The draft has let the branches of earlier verifications go.
        cause = "late" if hit is not None else "miss" if prepared else "cold"
        cause = state.absent or cause
        tokens = state.backup.propose(row.position, row.limit)
        return dataclasses.replace(moved, tokens=tokens), len(tokens), cause

    def _hear(self) -> None:
        """Puts what the draft has speculated into the caches."""
        if not self._expanded:
            return
        news = self._draft.news()
        for slot, (state, forks) in self._expanded.items():
            state.absent = news if isinstance(news, str) else None
            if not isinstance(news, str):
                assert state.cache is not None
                state.cache.fill(state.start, _entries(news, slot, forks))


def _entries(news: News, slot: int, forks: Sequence[int]) -> list[Entry]:
    """The branches of a slot, numbered by k and rank as in `speculation.branching`."""
    ranks = [(k, rank) for k, count in enumerate(forks) for rank in range(count)]
    proposed = news.proposed[slot].tolist()
    return [
        Entry(
            row=row,
            path=(*proposed[:k], int(news.bonus[slot, row])),
            rank=rank,
            tokens=tuple(news.tokens[slot, row, : news.lengths[slot, row]].tolist()),
            complete=True,
        )
        for row, (k, rank) in enumerate(ranks)
        if news.bonus[slot, row] >= 0
    ]
