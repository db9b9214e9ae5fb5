"""One sequence as the controller of SSD sees it: record, branches, backup. Pure host code."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

from ssd_jax.runtime.roles import Absence, DraftRow, Look, Moved, News
from ssd_jax.speculation.backup import Backup
from ssd_jax.speculation.cache import Entry, SpeculationCache
from ssd_jax.speculation.fan_out import After, FanOut


class Found(NamedTuple):
    """What a look-up found.

    Attributes:
      moved: how the record goes on.
      length: L of the new record.
      source: "hit", or the cause of a fallback: "cold" where nothing was prepared, "miss" where
        nothing for this outcome, "late" where what was prepared came too late, or why there was no
        news at all (`roles.Absence`).
      look: for the metrics; None where the outcome was told before.
    """

    moved: Moved
    length: int
    source: str
    look: Look | None = None

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
      budget: M.
      fan_out: of this sequence alone, so that its text depends on no other.
      backup: without a draft.
      room: tokens that may be committed.
    """

    def __init__(
        self, slot: int, *, k: int, budget: int, fan_out: FanOut, backup: Backup, room: int
    ) -> None:
        self._slot, self._k, self._budget = slot, k, budget
        self._fan_out, self._backup, self._room = fan_out, backup, room
        self._cache: SpeculationCache | None = None
        self._taken = 0  # position up to which cache and backup know the text
        self._told = 0  # and up to which the draft knows it
        self._start = 0  # of the record that is verified next
        self._length = 0
        self._after: After = "miss"
        self._absent: Absence | None = None  # why there was no news of its branches
        self._branches: list[Entry] = []  # as far as there was news
        self.prompted: Moved | None = None
        """The record that a finished prompt begins with, until the draft has it."""
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

    def look_up(self, row: DraftRow) -> Found:
        """Matches the committed tokens against the branches."""
        assert self._cache is not None
        prepared, looked = self._cache.prepared(self._start), None
        if new := _last(row.committed, row.position - self._taken):
            looked = min(len(new) - 1, self._length)
            if self._length:
                self._fan_out.observe(looked, self._length, self._after)
            self._backup.extend(new)
            self._cache.advance(new)
            self._taken, self._room = row.position, row.room
        hit = self._cache.find()
        moved = Moved(
            slot=row.slot,
            position=row.position,
            pending=row.committed[-1],
            committed=_last(row.committed, row.position - self._told),
        )
        if hit is not None and prepared and not hit.used:
            won = dataclasses.replace(moved, winner=hit.entry.row, limit=row.limit)
            length = min(len(hit.entry.tokens), row.limit)
            return Found(won, length, "hit", self._look(looked, hit.entry.rank, length))
        # The draft has let the branches of earlier verifications go.
        cause = "late" if hit is not None else "miss" if prepared else "cold"
        cause = self._absent or cause
        tokens = self._backup.propose(row.position, row.limit)
        missed = dataclasses.replace(moved, tokens=tokens)
        return Found(missed, len(tokens), cause, self._look(looked, None, 0))

    def _look(self, k: int | None, rank: int | None, used: int) -> Look | None:
        if k is None:
            return None
        made = sum(len(entry.tokens) for entry in self._branches)
        return Look(k, sum(entry.k == k for entry in self._branches), rank, made - used)

    def move(self, found: Found) -> None:
        """Goes on with a record that the draft has."""
        self._start = self._told = found.moved.position
        self._length, self._after = found.length, found.after
        self.made, self.prompted = not found.moved.tokens, None
        self._absent, self._branches = None, []

    def drafted(self, length: int) -> None:
        """Takes the L of a record that was drafted just in time."""
        self._length = length

    def forks(self) -> tuple[int, ...] | None:
        """F_0..F_L for the record; None where no outcome leaves room for another proposal.

        An outcome with k accepted tokens leaves room for one if k + 1 tokens, one proposed and the
        bonus after it may still be committed. k = L is kept all the same: its row runs s_L.
        """
        last = min(self._length, self._room - 3)
        if last < 0:
            return None
        if last == self._length:
            return self._fan_out.counts(last, self._budget, self._after)
        most = self._fan_out.counts(last, self._budget - 1, self._after)
        return (*most, *[0] * (self._length - last - 1), 1)

    def forwards(self) -> int:
        """How many bring every branch to the most tokens that its outcome leaves room for."""
        return self._room - (2 if self._length else 1)  # branches of k = L start one later

    def lowered(self, after: After) -> list[int]:
        """D of Saguaro sampling for the K tokens of a record that comes from there: the branches
        planned at each place, and the token drafted there."""
        return [count + 1 for count in self._fan_out.counts(self._k, self._budget, after)[:-1]]

    def hear(self, news: News | Absence, forks: Sequence[int]) -> None:
        """Takes what the draft has speculated, numbered as in `speculation.branching`."""
        if isinstance(news, str):
            self._absent = news
            return
        assert self._cache is not None
        ranks = [(k, rank) for k, count in enumerate(forks) for rank in range(count)]
        proposed = news.proposed[self._slot].tolist()
        bonus, lengths, tokens = (a[self._slot] for a in (news.bonus, news.lengths, news.tokens))
        entries = [
            Entry(
                row=row,
                path=(*proposed[:k], int(bonus[row])),
                rank=rank,
                tokens=tuple(tokens[row, : lengths[row]].tolist()),
                complete=True,
            )
            for row, (k, rank) in enumerate(ranks)
            if bonus[row] >= 0
        ]
        self._branches = entries
        self._cache.fill(self._start, entries)


def _last(tokens: Sequence[int], count: int) -> Sequence[int]:
    return tokens[len(tokens) - count :] if count > 0 else []
