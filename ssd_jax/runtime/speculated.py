"""One sequence as the controller of SSD sees it: record, branches, backup. Pure host code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from ssd_jax.runtime.roles import Absence, DraftRow, Look, Moved, News
from ssd_jax.speculation.acceptance import AcceptanceStats
from ssd_jax.speculation.backup import Backup
from ssd_jax.speculation.cache import Entry, SpeculationCache
from ssd_jax.speculation.fan_out import After, FanOut, VerificationStats
from ssd_jax.speculation.tuner import SpeculationPlan


class Found(NamedTuple):
    """What a look-up found.

    Attributes:
      moved: how the record goes on.
      length: L of the new record.
      source: "hit", or the cause of a fallback: "cold" where nothing was prepared, "miss" where
        nothing for this outcome, "late" where what was prepared came too late, or why there was no
        news at all (`roles.Absence`).
      look: for the metrics; None where the outcome was told before.
      more: tokens that a hit will have beyond these, if it is waited for.
      confidence: the draft's in its tokens, where that is known.
    """

    moved: Moved
    length: int
    source: str
    look: Look | None = None
    more: int = 0
    confidence: tuple[int, ...] = ()

    @property
    def after(self) -> After:
        """Where the new record comes from."""
        return "hit" if self.source == "hit" else "miss"


class Speculated:
    """A sequence in a slot.

    Whatever is told twice, because a step was interrupted, is taken once: positions tell.

    Args:
      slot: its row.
      k: K.
      fan_out: of this sequence alone, so that its text depends on no other.
      backup: without a draft.
      room: tokens that may be committed.
    """

    def __init__(self, slot: int, *, k: int, fan_out: FanOut, backup: Backup, room: int) -> None:
        self._slot, self._k = slot, k
        self._fan_out, self._backup, self._room = fan_out, backup, room
        self._cache: SpeculationCache | None = None
        self._taken = 0  # position up to which cache and backup know the text
        self._told = 0  # and up to which the draft knows it
        self._start = 0  # of the record that is verified next
        self.length = 0
        """L of that record."""
        self.after: After = "miss"
        """Where it comes from."""
        self.returns = AcceptanceStats()
        """What its rounds have brought."""
        self._planned = 0  # forwards of the expansion of this record
        self._prepared = False  # whether branches were there when the outcome was taken
        self._looked: int | None = None  # its k, if it was a new one
        self._absent: Absence | None = None  # why there was no news of its branches
        self._branches: list[Entry] = []  # as far as there was news
        self._confidence: tuple[int, ...] = ()  # the draft's in the record's tokens, if known
        self.prompted: Moved | None = None
        """The record that a finished prompt begins with, until the draft has it."""
        self.verified: VerificationStats | None = None
        """What became of the last verification, if `take` told something new."""
        self.made = True
        """Whether the draft made the record's tokens, so that it need not run them."""

    def prefill(self, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """Takes prompt tokens; the prompt is a verification with L = 0, its outcome the first
        token."""
        self._backup.extend(tokens)
        if last:
            self._start = self._taken = self._told = offset + len(tokens) - 1
            self._cache = SpeculationCache(self._start)
            self.prompted = Moved(slot=self._slot, position=self._start, pending=tokens[-1])

    def take(self, row: DraftRow) -> None:
        """Takes the outcome of the last verification."""
        assert self._cache is not None
        self._prepared, self._looked = self._cache.prepared(self._start), None
        self.verified = None
        if new := _last(row.committed, row.position - self._taken):
            self._looked = min(len(new) - 1, self.length)
            self._backup.extend(new)
            self._cache.advance(new)
            self._taken, self._room = row.position, row.room
            self._learn(len(new) - 1)

    def look_up(self, row: DraftRow) -> Found:
        """Matches the committed tokens, all of them taken, against the branches."""
        assert self._cache is not None
        hit = self._cache.find()
        moved = Moved(
            slot=row.slot,
            position=row.position,
            pending=row.committed[-1],
            committed=_last(row.committed, row.position - self._told),
        )
        if hit is not None and self._prepared and not hit.used:
            length = min(len(hit.entry.tokens), row.limit)
            won = dataclasses.replace(moved, winner=hit.entry.row, limit=length)
            more = min(self._most(hit.entry.k), row.limit) - length
            look = self._look(hit.entry.rank, length)
            return Found(won, length, "hit", look, max(more, 0), hit.entry.confidence)
        # The draft has let the branches of earlier verifications go.
        cause = "late" if hit is not None else "miss" if self._prepared else "cold"
        cause = self._absent or cause
        tokens = self._backup.propose(row.position, row.limit)
        missed = dataclasses.replace(moved, tokens=tokens)
        return Found(missed, len(tokens), cause, self._look(None, 0))

    def expected(self, length: int, more: int) -> list[float]:
        """Tokens that a round is expected to commit with `length` to `length + more` proposed."""
        return [self.returns.tokens(length + n) for n in range(more + 1)]

    def _most(self, k: int) -> int:
        """Tokens that a branch of this k will have when its expansion is complete."""
        return min(self._planned - (k == self.length), self._k)

    def _look(self, rank: int | None, used: int) -> Look | None:
        k = self._looked
        if k is None:
            return None
        made = sum(len(entry.tokens) for entry in self._branches)
        return Look(k, sum(entry.k == k for entry in self._branches), rank, made - used)

    def _learn(self, accepted: int) -> None:
        """Learns what became of the record, and of the branches that were prepared for it."""
        assert self._cache is not None
        hit = self._cache.find() if self._prepared else None
        verified = VerificationStats(min(accepted, self.length), self.length, self.after)
        if self.length:
            self.returns.observe(verified.accepted, self.length)
        if accepted == verified.accepted:
            prepared = sum(entry.k == accepted for entry in self._branches)
            rank = hit.entry.rank if hit is not None and not hit.used else None
            verified = verified._replace(prepared=prepared, rank=rank)
        self.verified = verified._replace(confidence=self._confidence)
        self._fan_out.observe(self.verified)

    def move(self, found: Found) -> None:
        """Goes on with a record that the draft has."""
        self._start = self._told = found.moved.position
        self.length, self.after = found.length, found.after
        self.made, self.prompted = not found.moved.tokens, None
        self._absent, self._branches = None, []
        self._confidence = found.confidence[: found.length]

    def drafted(self, length: int) -> None:
        """Takes the L of a record that was drafted just in time."""
        self.length = length

    @property
    def asks_confidence(self) -> bool:
        """Whether the fan-out would like to know of tokens that were drafted just in time."""
        drafted = self.made and self.length > len(self._confidence)
        return drafted and self._fan_out.reads_confidence

    def tell_confidence(self, confidence: Sequence[int]) -> None:
        """Takes the draft's confidence in the record's tokens."""
        self._confidence = tuple(confidence[: self.length])

    def forks(self, budget: int) -> tuple[int, ...] | None:
        """F_0..F_L for the record, `budget` in all; None where no outcome leaves room for another
        proposal.

        An outcome with k accepted tokens leaves room for one if k + 1 tokens, one proposed and the
        bonus after it may still be committed. k = L is kept all the same: its row runs s_L.
        """
        last = min(self.length, self._room - 3)
        if last < 0:
            return None
        if last == self.length:
            return self._fan_out.counts(last, budget, self.after, self._confidence)
        most = self._fan_out.counts(last, budget - 1, self.after, self._confidence)
        return (*most, *[0] * (self.length - last - 1), 1)

    def forwards(self) -> int:
        """How many bring every branch to the most tokens that its outcome leaves room for."""
        return self._room - (2 if self.length else 1)  # branches of k = L start one later

    def lowered(self, after: After, plan: SpeculationPlan) -> list[int]:
        """D of Saguaro sampling for the K tokens of a record that comes from there: the branches
        planned at each place, and the token drafted there."""
        return [count + 1 for count in self._fan_out.counts(plan.k, plan.budget, after)[:-1]]

    def expanded(self, forwards: int) -> None:
        """Takes how many forwards the branches of the record will get."""
        self._planned = forwards

    def hear(self, news: News | Absence, forks: Sequence[int]) -> None:
        """Takes what the draft has speculated so far, numbered as in `speculation.branching`."""
        if isinstance(news, str):
            self._absent = news
            return
        assert self._cache is not None
        proposed = tuple(news.proposed[self._slot].tolist())
        arrays = (news.bonus, news.lengths, news.tokens, news.confidence)
        branches = zip(*(array[self._slot].tolist() for array in arrays), strict=True)
        entries, row = [], 0
        for k, count in enumerate(forks):
            for rank, (bonus, length, tokens, confidence) in enumerate(islice(branches, count)):
                if bonus >= 0:
                    path = (*proposed[:k], bonus)
                    prepared = tuple(tokens[:length]), tuple(confidence[:length])
                    entries.append(Entry(row, path, rank, *prepared))
                row += 1
        self._branches = entries
        self._cache.fill(self._start, entries)


def _last(tokens: Sequence[int], count: int) -> Sequence[int]:
    return tokens[len(tokens) - count :] if count > 0 else []
