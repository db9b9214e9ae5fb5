"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers. Per round and slot: look the committed tokens up among the branches
that were prepared (`propose`); a hit makes that branch the record, a miss takes the backup. When
the verification of the records is dispatched, divide the branches over the next outcomes and
expand (`speculate`). A row that misses does not touch the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ssd_jax.runtime.activity import FORWARDS, Activity, Busy
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Absence, BranchingDraft, Drafted, DraftRow, News, Traits
from ssd_jax.runtime.speculated import Found, Speculated
from ssd_jax.speculation.backup import BackupKind, host_kind, make
from ssd_jax.speculation.fan_out import After, FanOut
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.tuner import FixedTuner, Tuner, teaches

Expanded = dict[int, tuple[Speculated, tuple[int, ...]]]
"""Sequences by slot, with F_0..F_L of their records."""


class Controller:
    """See `roles.Drafter`.

    Args:
      draft: runs the branches.
      k: most tokens of a proposal, at most the draft's.
      tuner: decides how many they are, and M, branches a slot: at most `k`, and the draft's.
      fan_out: makes the policy of a sequence.
      backup: what a miss proposes: "draft" waits for the draft, "auto" as long as that pays.
      tokens: how many ids the tokenizer has.
      lowers: whether the draft's Saguaro sampling looks at D, which is worked out only then.
      rule: of the verification, "ratio" or "coupled".
      settle: of a draft elsewhere: gives the proposals with all their q. The round's message then
        goes out when the target's forward is dispatched, not when its verification is.
      activity: of a draft elsewhere: what it has done since the last call. Without it nothing is
        known of the draft's speed, and whatever can be waited for is.
      pace: decides what is waited for.
      clock: seconds, monotonic.
    """

    def __init__(
        self,
        draft: BranchingDraft,
        *,
        k: int,
        tuner: Tuner,
        fan_out: Callable[[], FanOut],
        backup: BackupKind,
        tokens: int,
        lowers: bool = True,
        rule: str = "ratio",
        settle: Callable[[], Any] | None = None,
        activity: Callable[[], Activity] | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        waits = settle is not None or activity is not None or pace is not None
        self.traits = Traits(
            proposes="distribution",
            on_device=settle is None,
            timed=rule == "ratio" and (waits or not isinstance(tuner, FixedTuner)),
        )
        self.k = k
        self._settle, self._activity, self._lowers = settle, activity, lowers
        self._draft = draft
        self._tuner = tuner
        self._fan_out = fan_out
        self._backup: BackupKind = backup
        self._tokens, self._rule = tokens, rule
        self._teaching: dict[int, bool] = {}  # by slot
        self._slots: dict[int, Speculated] = {}
        self._live: dict[int, Speculated] = {}  # with a record that has no branches yet
        self._expanded: Expanded = {}
        self._news: News | Absence = "dead"
        self._pace, self._clock = pace or Pace(), clock
        self._plan = tuner.plan(rows=1, steps=self._pace.steps)
        self._expanding: deque[int] = deque(maxlen=2)  # M of the last expansions
        self._last: dict[int, Speculated] = {}  # rows of the last round, which began then
        self._began = 0.0
        self._work: list[Activity] = []  # of the draft, not reported yet
        self._forwarded: float | None = None  # when the last forward of this expansion ended

    def open(
        self, slot: int, params: SamplingParams, index: int, banned: Sequence[int], ban_before: int
    ) -> None:
        """See `roles.Drafter.open`."""
        self._slots[slot] = Speculated(
            slot,
            k=self.k,
            fan_out=self._fan_out(),
            backup=make(host_kind(self._backup), params.seed, index, self._tokens),
            room=params.max_tokens,
        )
        self._teaching[slot] = teaches(params.temperature, self._rule)
        # What a step that was interrupted has left behind is not to reach new requests.
        self._live, self._work = {}, []
        self._draft.open(slot, params, index, banned, ban_before)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `roles.Drafter.prefill`."""
        self._draft.prefill(slot, tokens, offset)
        self._slots[slot].prefill(tokens, offset, last=last)

    def propose(self, rows: Sequence[DraftRow]) -> Drafted:
        """See `roles.Drafter.propose`."""
        began = self._clock()
        heard = self._hear()
        rows = [replace(row, limit=min(row.limit, self._plan.k)) for row in rows]
        for row in rows:
            each = self._slots[row.slot]
            each.take(row)
            if each.verified is not None and self._teaching[row.slot]:
                self._tuner.observe(each.verified)
        found = {row.slot: self._slots[row.slot].look_up(row) for row in rows}
        self._note(began, rows, found)
        self._wait(heard, rows, found)
        waited = self._just_in_time(rows, found)
        lengths = np.zeros(self._draft.slots, np.int32)
        for slot, each in found.items():
            lengths[slot] = each.length
        self._move(found)
        asked = self._clock()
        if waited.any():
            drafted = self._draft.draft(waited, lowered=self._lowered("miss"))
            for slot in np.flatnonzero(waited):
                lengths[slot] = drafted[slot]
                self._slots[int(slot)].drafted(int(drafted[slot]))
        sources = {slot: each.source for slot, each in found.items()}
        settle = None if self._settle is None else self._settled
        return Drafted(
            lengths,
            self._draft.proposal(),
            sources,
            settle,
            looks={slot: each.look for slot, each in found.items() if each.look is not None},
            activity=self._worked(int(waited.max()), self._clock() - asked),
        )

    def speculate(self) -> None:
        """See `roles.Drafter.speculate`."""
        if any(each.prompted for each in self._slots.values()):
            self._move({})
        if self._live:
            self._plan = self._tuner.plan(rows=len(self._live), steps=self._pace.steps)
        asking = {slot: each for slot, each in self._live.items() if each.asks_confidence}
        if asking:
            confidence = self._draft.confidence()
            for slot, each in asking.items():
                each.tell_confidence(confidence[slot].tolist())
        expanded = {
            slot: (each, forks)
            for slot, each in self._live.items()
            if (forks := each.forks(self._plan.budget)) is not None
        }
        self._live = {}
        if not expanded:
            return
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow = np.zeros(self._draft.slots, bool)
        for slot, (each, forks) in expanded.items():
            counts[slot, : len(forks)] = forks
            follow[slot] = not each.made
        most = max(each.forwards() for each, _ in expanded.values())
        forwards = min(self._plan.forwards, most)
        self._draft.expand(counts, follow=follow, lowered=self._lowered("hit"), forwards=forwards)
        for each, _ in expanded.values():
            each.expanded(forwards)
        self._expanding.append(self._plan.budget)
        self._expanded = expanded

    def _lowered(self, after: After) -> np.ndarray:
        """D of Saguaro sampling [B, K]; see `Speculated.lowered`."""
        lowered = np.zeros((self._draft.slots, self._draft.k), np.int32)
        for slot, each in self._slots.items() if self._lowers else ():
            lowered[slot, : self._plan.k] = each.lowered(after, self._plan)
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

    def _hear(self) -> Expanded:
        """Puts what the draft has speculated so far into the caches; returns whose it was."""
        if not self._expanded:
            return {}
        self._news, self._forwarded = self._draft.news(1), None
        self._gather()
        expanded, self._expanded = self._expanded, {}
        for each, forks in expanded.values():
            each.hear(self._news, forks)
        return expanded

    def _wait(self, heard: Expanded, rows: Sequence[DraftRow], found: dict[int, Found]) -> None:
        """Waits for more tokens of the branches that were hit, if that pays."""
        hits = any(each.more for each in found.values())
        if not heard or not hits or isinstance(self._news, str):
            return
        more = self._pace.worth(
            "branches",
            [self._slots[slot].expected(each.length, each.more) for slot, each in found.items()],
            self._usual(rows),
            underway=self._underway(),
        )
        if not more:
            return
        news = self._draft.news(self._news.forwards + more)
        if isinstance(news, str):
            return
        for row in rows:
            if found[row.slot].more:
                each, forks = heard[row.slot]
                each.hear(news, forks)
                found[row.slot] = each.look_up(row)

    def _underway(self) -> float:
        """Seconds that the draft has been at the forward that it has not told of yet."""
        return 0.0 if self._forwarded is None else max(self._clock() - self._forwarded, 0.0)

    def _just_in_time(self, rows: Sequence[DraftRow], found: dict[int, Found]) -> np.ndarray:
        """How many tokens [B] to wait for where there was no hit; changes L in `found`."""
        waited = np.zeros(self._draft.slots, np.int32)
        missed = [row for row in rows if found[row.slot].source != "hit"]
        if self._backup not in ("auto", "draft") or not missed:
            return waited
        forwards = max(row.limit for row in missed)
        if self._backup == "auto":
            worth = [self._worth(row) for row in missed]
            forwards = self._pace.worth("record", worth, self._usual(rows))
        for row in missed:
            length = waited[row.slot] = min(forwards, row.limit)
            found[row.slot] = found[row.slot]._replace(length=length)
        return waited

    def _worth(self, row: DraftRow) -> list[float]:
        """What a row's round is expected to bring with 0, 1, ... tokens, the next hit included."""
        each = self._slots[row.slot]
        return [
            count + each.returns.next_round(empty=length == 0)
            for length, count in enumerate(each.expected(0, row.limit))
        ]

    def _usual(self, rows: Sequence[DraftRow]) -> float:
        """Tokens that a round of these rows commits lately."""
        return sum(self._slots[row.slot].returns.usual(row.limit) for row in rows)

    def _note(self, began: float, rows: Sequence[DraftRow], found: dict[int, Found]) -> None:
        """Tells pace and rows of the round that has ended, where another follows it."""
        last, self._last = self._last, {row.slot: self._slots[row.slot] for row in rows}
        gone_on = [row for row in rows if last.get(row.slot) is self._slots[row.slot]]
        if gone_on:
            self._pace.round(began - self._began)
        for row in gone_on:
            each = self._slots[row.slot]
            each.returns.round(
                len(row.committed),
                hit=each.after == "hit",
                empty=not each.length,
                found=found[row.slot].source == "hit",
            )
        self._began = began

    def _worked(self, drafted: int, seconds: float) -> Activity | None:
        """What the draft has done; tells the pace what tokens drafted just in time have cost.

        Args:
          drafted: tokens that were waited for just now.
          seconds: that it took.
        """
        if self._activity is None:
            return None
        for span in self._gather():
            if span.what == "draft" and drafted:
                busy = span.end - span.begin
                self._pace.forward("record", busy / drafted)
                self._pace.drafted(max(seconds - busy, 0.0))
        work, self._work = self._work, []
        return Activity(
            tuple(span for each in work for span in each.spans), sum(each.bytes for each in work)
        )

    def _gather(self) -> Sequence[Busy]:
        """Takes what the draft tells of its work; tells the pace how long each forward took."""
        if self._activity is None:
            return ()
        activity = self._activity()
        self._work.append(activity)
        # A span is of the last expansion or of the one before; it does not say which.
        same = len(self._expanding) == 2 and len(set(self._expanding)) == 1
        branches = self._expanding[-1] if same else None
        for span in activity.spans:
            if span.what in FORWARDS:
                self._pace.forward("branches", span.end - span.begin, branches)
                self._forwarded = span.end
        return activity.spans
