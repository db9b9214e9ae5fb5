"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers; a batch goes through it in arrays [B, ...]. A round takes these forms:
the outcome (`DraftBatch`), its look-up in the cache (`CacheLookup`), the promotion of the branches
that came true (`Promotion`), and the proposal (`Drafted`). While the target verifies it, the
branches are divided over its outcomes and expanded (`speculate`), and what they speculate fills the
cache (`gather`). A row that misses takes its backup and does not touch the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from ssd_jax.roles.activity import FORWARDS, Activity, Busy
from ssd_jax.roles.protocols import BranchingDraft, Traits
from ssd_jax.roles.records import (
    IDLE,
    Absence,
    BranchTokens,
    CacheLookup,
    DraftBatch,
    Drafted,
    Promotion,
    SlotOpening,
    promotion,
)
from ssd_jax.speculation.backup import BackupKind, host_kind, make
from ssd_jax.speculation.cache import SpeculationCache
from ssd_jax.speculation.fan_out import After, FanOut, VerificationStats
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.sequence_state import SequenceState
from ssd_jax.speculation.tuner import FixedTuner, Tuner, teaches


class Controller:
    """See `protocols.Drafter`.

    Args:
      draft: runs the branches.
      k: most tokens of a proposal, at most the draft's.
      tuner: decides how many they are, and M, branches a slot: at most `k`, and the draft's.
      fan_out: makes the policy of a sequence.
      backup: what a miss proposes: "draft" waits for the draft, "auto" as long as that pays.
      tokens: how many ids the tokenizer has.
      lowers: whether the draft's Saguaro sampling looks at D, which is worked out only then.
      rule: of the verification, "ratio" or "coupled".
      elsewhere: the draft has devices of its own.
      activity: what such a draft has done since the last call. Without it nothing is known of the
        draft's speed, and whatever can be waited for is.
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
        elsewhere: bool = False,
        activity: Callable[[], Activity] | None = None,
        pace: Pace | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        waits = elsewhere or activity is not None or pace is not None
        self.traits = Traits(
            proposes="distribution",
            on_device=not elsewhere,
            timed=rule == "ratio" and (waits or not isinstance(tuner, FixedTuner)),
        )
        self.k = k
        self._draft, self._activity, self._lowers = draft, activity, lowers
        self._tuner, self._fan_out = tuner, fan_out
        self._backup: BackupKind = backup
        self._tokens, self._rule = tokens, rule
        self._states: dict[int, SequenceState] = {}  # by slot
        self._cache = SpeculationCache(draft.slots, draft.branches)
        self._absent: Absence | None = None  # why there are no branches of the last expansion
        rows = draft.slots
        self._known = np.full(rows, -1, np.int32)  # position up to which the texts are known
        self._prompted = np.full(rows, -1, np.int32)  # a prompt's last token, until its record
        self._untold = np.full((rows, draft.k + 1), -1, np.int32)  # committed, no promotion yet
        self._live = np.zeros(rows, bool)  # has a record that has no branches yet
        self._expanded = np.zeros(rows, bool)  # has one whose branches were asked for
        self._unlearned: list[tuple[SequenceState, VerificationStats]] = []
        self._pace, self._clock = pace or Pace(), clock
        self._plan = tuner.plan(rows=1, steps=self._pace.steps)
        self._expanding: deque[int] = deque(maxlen=2)  # M of the last expansions
        self._last: dict[int, SequenceState] = {}  # rows of the last round, which began then
        self._began = 0.0
        self._work: list[Activity] = []  # of the draft, not reported yet
        self._forwarded: float | None = None  # when the last forward of this expansion ended

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Drafter.open`."""
        slot, params = opening.slot, opening.params
        self._states[slot] = SequenceState(
            fan_out=self._fan_out(),
            backup=make(host_kind(self._backup), params.seed, opening.index, self._tokens),
            room=params.max_tokens,
            teaches=teaches(params.temperature, self._rule),
        )
        self._known[slot] = self._prompted[slot] = self._untold[slot] = -1
        # What a step that was interrupted has left behind is not to reach new requests.
        self._live[:], self._expanded[slot], self._work = False, False, []
        self._draft.open(opening)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `protocols.Drafter.prefill`. The prompt is a verification with L = 0, whose outcome
        is the first token."""
        self._draft.prefill(slot, tokens, offset)
        self._states[slot].backup.extend(tokens)
        if last:
            self._known[slot] = offset + len(tokens) - 1
            self._prompted[slot] = tokens[-1]

    def gather(self, until: Callable[[], bool]) -> None:
        """See `protocols.Drafter.gather`."""
        if self._expanded.any():
            self._fill(self._draft.branch_tokens(1, until))

    def propose(self, batch: DraftBatch) -> Drafted:
        """See `protocols.Drafter.propose`."""
        began, rows = self._clock(), batch.slots
        if self._expanded.any() and self._absent is None:
            self._fill(self._draft.branch_tokens(1))
        limit = np.minimum(batch.limit, self._plan.k)
        lookup, sources = self._take(batch, rows)
        self._note(began, batch, rows, sources)
        lookup = self._wait(batch, rows, limit, lookup)
        waited = self._just_in_time(rows, limit, sources)
        lengths = self._promote(batch, rows, limit, lookup)
        asked = self._clock()
        if waited.any():
            drafted = self._draft.draft(waited, lowered=self._lowered("miss"))
            lengths = np.where(waited > 0, drafted, lengths)
            for slot in np.flatnonzero(waited).tolist():
                self._states[slot].length = int(lengths[slot])
        return Drafted(
            lengths,
            self._draft.tokens(),
            sources,
            lookup,
            activity=self._worked(int(waited.max()), self._clock() - asked),
        )

    def proposal(self) -> Any:
        """See `protocols.Drafter.proposal`."""
        return self._draft.proposal()

    def speculate(self) -> None:
        """See `protocols.Drafter.speculate`."""
        self._learn()
        if (self._prompted >= 0).any():
            self._begin(promotion(self._draft.slots, self._draft.k))
        if not self._live.any():
            return
        live = {slot: self._states[slot] for slot in np.flatnonzero(self._live).tolist()}
        self._plan = self._tuner.plan(rows=len(live), steps=self._pace.steps)
        asking = {slot: each for slot, each in live.items() if each.asks_confidence}
        if asking:
            confidence = self._draft.confidence()
            for slot, each in asking.items():
                each.confidence = tuple(confidence[slot, : each.length].tolist())
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow, most = np.zeros(self._draft.slots, bool), 0
        for slot, each in live.items():
            forks = each.forks(self._plan.budget)
            if forks is not None:
                counts[slot, : len(forks)], follow[slot] = forks, not each.made
                most = max(most, each.most_forwards())
        self._live[:] = False
        expanded = np.asarray(counts.any(axis=1))
        if not expanded.any():
            return
        forwards = min(self._plan.forwards, most)
        self._draft.expand(counts, follow=follow, lowered=self._lowered("hit"), forwards=forwards)
        for slot in np.flatnonzero(expanded).tolist():
            self._states[slot].forwards = forwards
        self._cache.prepare(counts)
        self._expanding.append(self._plan.budget)
        self._expanded, self._forwarded = expanded, None

    def _fill(self, told: BranchTokens | Absence | None) -> None:
        """Puts what the draft has speculated so far into the cache; None is nothing yet."""
        if told is None or told is self._cache.branches:
            return
        if isinstance(told, str):
            self._absent = told
        else:
            self._absent = None
            self._cache.fill(told)
        self._gather_work()

    def _take(self, batch: DraftBatch, rows: list[int]) -> tuple[CacheLookup, dict[int, str]]:
        """Takes the outcomes, each once, and looks them up."""
        k = np.full(self._draft.slots, -1, np.int32)
        new = np.asarray((batch.limit > 0) & (batch.position > self._known))
        k[new] = batch.counts[new] - 1
        held, lookup = self._cache.held(), self._cache.look_up(k, _bonus(batch))
        self._untold[new, : batch.tokens.shape[1]] = batch.tokens[new]
        self._known[new] = batch.position[new]
        sources: dict[int, str] = {}
        for slot in rows:
            each, absent = self._states[slot], self._absent if self._expanded[slot] else None
            hit = lookup.branch[slot] >= 0
            sources[slot] = "hit" if hit else absent or ("miss" if held[slot] else "cold")
            each.room = int(batch.room[slot])
            if not new[slot]:
                continue
            accepted = int(k[slot])
            each.backup.extend(batch.tokens[slot, : accepted + 1].tolist())
            if each.length:
                each.stats.observe(accepted, each.length)
            rank = int(lookup.rank[slot]) if hit else None
            verified = each.verified(accepted, int(lookup.prepared[slot]), rank)
            self._unlearned.append((each, verified))
        return lookup, sources

    def _learn(self) -> None:
        """Teaches what became of the last verifications."""
        unlearned, self._unlearned = self._unlearned, []
        for each, verified in unlearned:
            each.fan_out.observe(verified)
            if each.teaches:
                self._tuner.observe(verified)

    def _promote(
        self, batch: DraftBatch, rows: list[int], limit: np.ndarray, lookup: CacheLookup
    ) -> np.ndarray:
        """Makes records of the branches that came true, of backups elsewhere; their L [B]."""
        told, branches = promotion(self._draft.slots, self._draft.k), self._cache.branches
        told.position[rows] = batch.position[rows]
        told.pending[rows] = batch.tokens[rows, batch.counts[rows] - 1]
        told.winner[:] = lookup.branch
        for slot in rows:
            each, winner = self._states[slot], int(lookup.branch[slot])
            if winner >= 0:
                assert branches is not None
                length = min(int(branches.lengths[slot, winner]), int(limit[slot]))
                confidence = branches.confidence[slot, winner, :length].tolist()
                each.begin(length, "hit", confidence, made=True)
                lookup.wasted[slot] -= length
            else:
                tokens = each.backup.propose(int(batch.position[slot]), int(limit[slot]))
                length = len(tokens)
                told.tokens[slot, :length] = tokens
                each.begin(length, "miss", (), made=not length)
            told.limit[slot] = length
        self._prompted[rows] = -1
        self._begin(told)
        return told.limit

    def _begin(self, told: Promotion) -> None:
        """Hands all new records over, those of finished prompts among them."""
        begun = self._prompted >= 0
        told.position[begun], told.pending[begun] = self._known[begun], self._prompted[begun]
        for slot in np.flatnonzero(begun).tolist():
            self._states[slot].begin(0, "miss", (), made=True)
        moved = np.asarray(told.position != IDLE)
        told.committed[moved] = self._untold[moved]
        # Whatever becomes of the call, the branches are gone.
        self._cache.clear()
        self._live[:], self._expanded[:], self._absent = False, False, None
        self._draft.promote(told)
        self._prompted[moved] = self._untold[moved] = -1
        self._live = moved

    def _lowered(self, after: After) -> np.ndarray:
        """D of Saguaro sampling [B, K]; see `SequenceState.lowered`."""
        lowered = np.zeros((self._draft.slots, self._draft.k), np.int32)
        if self._lowers:
            self._learn()
            for slot, each in self._states.items():
                lowered[slot, : self._plan.k] = each.lowered(after, self._plan)
        return lowered

    def _wait(
        self, batch: DraftBatch, rows: list[int], limit: np.ndarray, lookup: CacheLookup
    ) -> CacheLookup:
        """Waits for more tokens of the branches that were hit, if that pays."""
        branches, expected, hits = self._cache.branches, [], False
        if branches is None or not (lookup.branch >= 0).any():
            return lookup
        for slot in rows:
            each, winner, more = self._states[slot], lookup.branch[slot], 0
            length = 0
            if winner >= 0:
                length = min(int(branches.lengths[slot, winner]), int(limit[slot]))
                # What it will have when its expansion is complete; those of k = L start later.
                most = min(each.forwards - (lookup.k[slot] == each.length), self.k)
                more = max(min(int(most), int(limit[slot])) - length, 0)
            hits = hits or more > 0
            expected.append(each.expected(length, more))
        if not hits:
            return lookup
        usual, underway = self._usual(rows, limit), self._underway()
        more = self._pace.worth("branches", expected, usual, underway=underway)
        if not more:
            return lookup
        self._fill(self._draft.branch_tokens(branches.forwards + more))
        if self._absent is not None:  # what has come before will do
            self._absent = None
            return lookup
        return self._cache.look_up(lookup.k, _bonus(batch))

    def _underway(self) -> float:
        """Seconds that the draft has been at the forward that it has not told of yet."""
        return 0.0 if self._forwarded is None else max(self._clock() - self._forwarded, 0.0)

    def _just_in_time(
        self, rows: list[int], limit: np.ndarray, sources: dict[int, str]
    ) -> np.ndarray:
        """How many tokens [B] to wait for where there was no hit."""
        waited = np.zeros(self._draft.slots, np.int32)
        missed = [slot for slot in rows if sources[slot] != "hit"]
        if self._backup in ("auto", "draft") and missed:
            forwards = int(limit[missed].max())
            if self._backup == "auto":
                worth = [self._worth(slot, int(limit[slot])) for slot in missed]
                forwards = self._pace.worth("record", worth, self._usual(rows, limit))
            waited[missed] = np.minimum(forwards, limit[missed])
        return waited

    def _worth(self, slot: int, limit: int) -> list[float]:
        """What a row's round is expected to bring with 0, 1, ... tokens, the next hit included."""
        each = self._states[slot]
        return [
            count + each.stats.next_round(empty=length == 0)
            for length, count in enumerate(each.expected(0, limit))
        ]

    def _usual(self, rows: list[int], limit: np.ndarray) -> float:
        """Tokens that a round of these rows commits lately."""
        return sum(self._states[slot].stats.usual(int(limit[slot])) for slot in rows)

    def _note(
        self, began: float, batch: DraftBatch, rows: list[int], sources: dict[int, str]
    ) -> None:
        """Tells pace and rows of the round that has ended, where another follows it."""
        last, self._last = self._last, {slot: self._states[slot] for slot in rows}
        gone_on = [slot for slot in rows if last.get(slot) is self._states[slot]]
        if gone_on:
            self._pace.round(began - self._began)
        for slot in gone_on:
            each = self._states[slot]
            each.stats.round(
                int(batch.counts[slot]),
                hit=each.after == "hit",
                empty=not each.length,
                found=sources[slot] == "hit",
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
        for span in self._gather_work():
            if span.what == "draft" and drafted:
                busy = span.end - span.begin
                self._pace.forward("record", busy / drafted)
                self._pace.drafted(max(seconds - busy, 0.0))
        work, self._work = self._work, []
        return Activity(
            tuple(span for each in work for span in each.spans), sum(each.bytes for each in work)
        )

    def _gather_work(self) -> Sequence[Busy]:
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


def _bonus(batch: DraftBatch) -> np.ndarray:
    """t* of each row [B]: the last token that was committed."""
    return batch.tokens[np.arange(len(batch.counts)), batch.counts - 1]
