"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers, in arrays [B, ...] of a batch. A round takes these forms: the outcome
(`DraftBatch`), its look-up in the cache (`CacheLookup`), the promotion of the branches that came
true (`Promotion`), and the proposal (`Drafted`). The proposal has the branches' tokens from the
cache, so the draft is asked for the new records (`RecordRequest`) beside the verification, unless
it is to draft some just in time; then for branches of their outcomes (`ExpansionRequest`), whose
tokens fill the cache (`gather`). Work that no proposal waits for is deferred: what the policies
learn until branches are asked for (`_catch_up`); the report of the draft's work and the plan of
later rounds until the target is busy (`proposal`).
"""

from __future__ import annotations

import functools
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Int32

from ssd_jax.roles.activity import Activity
from ssd_jax.roles.handles import ProposalHandle
from ssd_jax.roles.protocols import BranchingDraft, Drafter, ExpansionAnswer, RecordAnswer
from ssd_jax.roles.records import (
    IDLE,
    Absence,
    BranchTokens,
    DraftBatch,
    Drafted,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    SlotOpening,
    promotion,
    record_request,
)
from ssd_jax.speculation.backup import BackupKind, make
from ssd_jax.speculation.cache import SpeculationCache
from ssd_jax.speculation.draft_work import DraftWork
from ssd_jax.speculation.fan_out import After, FanOut, VerificationStats
from ssd_jax.speculation.order import Order
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.sequence_state import RoundState, SequenceState
from ssd_jax.speculation.tuner import FixedTuner, Tuner, teaches


class Controller(Drafter):
    """The drafter of SSD.

    Args:
      draft: runs the branches.
      k: most tokens of a proposal, at most the draft's.
      tuner: decides the tokens of a proposal, at most `k`, and M, branches a slot, at most the
        draft's.
      fan_out: makes the policy of a sequence.
      backup: what a miss proposes: "draft" waits for the draft, "auto" as long as that pays.
      tokens: number of ids of the tokenizer.
      lowers: whether the draft's Saguaro sampling uses D, which is computed only then.
      rule: of the verification, "ratio" or "coupled".
      elsewhere: the draft has devices of its own.
      order: decides whether it asks first, see `protocols.Drafter`; by default it never does.
      activity: returns what such a draft has done since the last call. Without it the draft's speed
        is unknown, and the controller waits for everything that it can.
      pace: decides what to wait for.
      put_off: requests may be preempted, and continue without the branches that they had.
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
        order: Order | None = None,
        activity: Callable[[], Activity] | None = None,
        pace: Pace | None = None,
        put_off: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        waits = elsewhere or put_off or activity is not None or pace is not None
        self.k, self.on_device = k, not elsewhere
        self.timed = rule == "ratio" and (waits or not isinstance(tuner, FixedTuner))
        self._draft, self._lowers = draft, lowers
        self._tuner, self._fan_out = tuner, fan_out
        self._backup: BackupKind = backup
        self._tokens, self._rule = tokens, rule
        self._states: dict[int, SequenceState] = {}  # by slot
        self._cache = SpeculationCache()
        self._absent: Absence | None = None  # why there are no branches of the last expansion
        rows = draft.slots
        self._known = [-1] * rows  # position up to which each text is known
        self._prompted: dict[int, int] = {}  # by slot, a prompt's last token, until its record
        self._untold: dict[int, list[int]] = {}  # by slot: committed, no promotion yet
        self._live: set[int] = set()  # slots with a record that has no branches yet
        self._expanded: set[int] = set()  # slots with a record whose branches were asked for
        self._lengths = np.zeros(rows, np.int32)  # L of the records
        self._forwards = 0  # planned for the last expansion
        self._unasked: RecordRequest | None = None  # the records of a proposal, to be asked for
        self._records: RecordAnswer | None = None
        self._branches: ExpansionAnswer | None = None
        self._later: deque[Callable[[], None]] = deque()
        self._pace, self._order, self._clock = pace or Pace(), order or Order(first=False), clock
        self.asks_first = self._order.first
        self._ready = 0.0  # when the target's forward could be dispatched
        self._plan = self._next_plan = tuner.plan(rows=1, steps=self._pace.steps)
        self._taught: list[VerificationStats] = []  # that the tuner has not observed yet
        self._last: dict[int, SequenceState] = {}  # rows of the last round, which began at `_began`
        self._began = 0.0
        self._work = DraftWork(activity, self._pace, self._order)
        self._behind: Callable[[], None] | None = None  # what is done once the target is at work

    def open(self, opening: SlotOpening) -> None:
        """See `protocols.Drafter.open`."""
        slot, params = opening.slot, opening.params
        self._states[slot] = SequenceState(
            fan_out=self._fan_out(),
            backup=make(self._backup, params.seed_of_request, opening.index, self._tokens),
            room=params.most_tokens,
            teaches=teaches(params.temperature, self._rule),
        )
        # Leftovers of an interrupted step must not reach new requests.
        self._known[slot] = -1
        self._untold.pop(slot, None)
        self._prompted.pop(slot, None)
        self._live.clear()
        self._expanded.discard(slot)
        self._unasked = None
        self._work.forget()
        self._draft.open(opening)

    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        """See `protocols.Drafter.set_pages`."""
        self._draft.set_pages(slot, pages)

    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """See `protocols.Drafter.prefill`.

        The text counts as a verification with L = 0, whose outcome is the token behind it.
        """
        self._draft.prefill(slot, tokens, offset)
        self._states[slot].backup.extend(tokens)
        if last:
            self._known[slot] = offset + len(tokens) - 1
            self._prompted[slot] = tokens[-1]

    def gather(self, until: Callable[[], bool]) -> None:
        """See `protocols.Drafter.gather`."""
        if self._expanded and self._branches is not None:
            self._fill(self._branches.branches(1, until))

    def propose(self, batch: DraftBatch) -> Drafted:
        """See `protocols.Drafter.propose`."""
        began = self._clock()
        if self._absent is None and self._expanded and self._branches is not None:
            self._fill(self._branches.branches(1))
        this = self._take(batch, began)
        missed = [slot for slot, source in this.sources.items() if source != "hit"]
        self._wait(this)
        request, began_draft = self._request(this, missed), self._clock()
        tokens, most = request.promotion.tokens, int(request.drafts.max())
        # Even if the draft fails, the branches are gone.
        self._drop_branches()
        if most:
            records = self._ask_records(request)
            this.lengths = np.where(request.drafts > 0, records.lengths(), this.lengths)
            self._lengths, tokens = this.lengths, records.tokens()
        else:
            self._lengths, self._unasked = this.lengths, request
        drafted = Drafted(this.lengths, tokens, this.sources, this.lookup)
        self._ready = self._clock()
        seconds = self._ready - began_draft
        self._behind = functools.partial(self._work_behind, this, drafted, most, seconds)
        return drafted

    def proposal(self) -> ProposalHandle:
        """See `protocols.Drafter.proposal`."""
        if self.asks_first:
            self._order.delayed(self._clock() - self._ready)
        assert self._records is not None
        proposal, behind = self._records.proposal(), self._behind
        self._behind = None
        if behind is not None:
            behind()
        return proposal

    def speculate(self) -> None:
        """See `protocols.Drafter.speculate`."""
        if self._unasked is not None:
            self._ask_records(self._unasked)
        elif self._prompted:
            self._drop_branches()
            self._ask_records(record_request(promotion(self._draft.slots, self._draft.k)))
        self._catch_up()
        if not self._live:
            return
        live = {slot: self._states[slot] for slot in sorted(self._live)}
        self._plan = self._next_plan
        asking = {slot: each for slot, each in live.items() if each.asks_confidence}
        if asking and self._records is not None:
            confidence = self._records.confidence()
            for slot, each in asking.items():
                each.confidence = tuple(confidence[slot, : each.length].tolist())
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow, most = np.zeros(self._draft.slots, bool), 0
        for slot, each in live.items():
            forks = each.forks(self._plan.budget)
            if forks is not None:
                counts[slot, : len(forks)], follow[slot] = forks, not each.made
                most = max(most, each.most_forwards())
        if not self.asks_first:
            self._order.delayed(self._clock() - self._ready)
        self._live.clear()
        expanded = {slot for slot in live if counts[slot].any()}
        if not expanded:
            return
        forwards = self._forwards = min(self._plan.forwards, most)
        self._order.asked(self._clock(), forwards)
        lowered = self._lowered("hit")
        self._branches = self._draft.expand(ExpansionRequest(counts, follow, lowered, forwards))
        self._ready = self._clock()
        self._cache.prepare(counts)
        self._work.expands(self._plan.budget)
        self._expanded = expanded

    def _fill(self, told: BranchTokens | Absence | None) -> None:
        """Puts what the draft has speculated so far into the cache; None means nothing yet."""
        if isinstance(told, str):
            self._absent = told
        elif told is not None and told is not self._cache.branches:
            self._absent, self._cache.branches = None, told

    def _take(self, batch: DraftBatch, began: float) -> RoundState:
        """Takes the outcomes, each once, and looks them up."""
        states = {slot: self._states[slot] for slot in batch.slots}
        positions, counts, k = (
            batch.position.tolist(),
            batch.counts.tolist(),
            [-1] * len(self._known),
        )
        for slot, state in states.items():
            if positions[slot] > self._known[slot]:
                k[slot], self._known[slot] = counts[slot] - 1, positions[slot]
                self._untold[slot] = tokens = batch.tokens[slot].tolist()
                state.backup.extend(tokens[: counts[slot]])
        lookup = self._cache.look_up(k, batch.pending.tolist())
        sources = dict.fromkeys(states, "hit")
        for slot in states:
            if lookup.branch[slot] < 0:
                held = "miss" if self._cache.held(slot) else "cold"
                found = self._absent or self._cache.absent(slot) or held
                sources[slot] = found if slot in self._expanded else "cold"
        limit, lengths = batch.limit, np.zeros(len(k), np.int32)
        if self._plan.k < self.k:
            limit = np.minimum(limit, self._plan.k)
        this = RoundState(began, batch, limit, states, sources, lookup, lengths)
        self._later.append(functools.partial(self._learn, this))
        return this

    def _catch_up(self) -> None:
        """Does the deferred work."""
        while self._later:
            self._later.popleft()()

    def _learn(self, this: RoundState) -> None:
        """Reports the ended round, if another follows it, to pace, rows and policies."""
        batch, lookup = this.batch, this.lookup
        last, self._last = self._last, this.states
        if any(last.get(slot) is each for slot, each in this.states.items()):
            self._pace.round(this.began - self._began)
        self._began = this.began
        for slot, each in this.states.items():
            each.room = int(batch.room[slot])
            hit, count = lookup.branch[slot] >= 0, int(batch.counts[slot])
            if last.get(slot) is each:
                each.stats.round(count, hit=each.after == "hit", empty=not each.length, found=hit)
            if lookup.k[slot] < 0:
                continue
            if each.length:
                each.stats.observe(count - 1, each.length)
            rank = int(lookup.rank[slot]) if hit else None
            verified = each.verified(count - 1, int(lookup.prepared[slot]), rank)
            each.fan_out.observe(verified)
            if each.teaches:
                self._taught.append(verified)

    def _request(self, this: RoundState, missed: list[int]) -> RecordRequest:
        """Records of the branches that came true, and of backups in all other rows.

        `committed` is still empty.
        """
        drafts, lowered = self._just_in_time(this, missed)
        batch, branches = this.batch, self._cache.branches
        slots, k = self._draft.slots, self._draft.k
        tokens, committed = np.zeros((slots, k), np.int32), np.full((slots, k + 1), -1, np.int32)
        backups: dict[int, int] = {}
        for slot in this.states:
            if slot in missed:
                backup = this.states[slot].backup
                proposed = backup.propose(int(batch.position[slot]), int(this.limit[slot]))
                this.lengths[slot] = backups[slot] = len(proposed)
                tokens[slot, : len(proposed)] = proposed
            elif branches is not None:
                length = this.lengths[slot]
                tokens[slot, :length] = branches.tokens[slot, this.lookup.branch[slot], :length]
        self._later.append(functools.partial(self._begin_records, this, branches, backups))
        for slot in this.states if self._prompted else ():
            self._prompted.pop(slot, None)
        rows = batch.position, batch.pending, committed, this.lookup.branch, tokens
        return RecordRequest(Promotion(*rows, limit=this.lengths), drafts, lowered)

    def _begin_records(
        self, this: RoundState, branches: BranchTokens | None, given: Mapping[int, int]
    ) -> None:
        """Tells each row of its record; `given` are the backup's tokens in rows that missed."""
        for slot, each in this.states.items():
            winner, length = this.lookup.branch[slot], int(this.lengths[slot])
            if slot in given:
                each.begin(length, "miss", (), made=not given[slot])
            elif branches is not None:
                confidence = branches.confidence[slot, winner, :length].tolist()
                each.begin(length, "hit", confidence, made=True)

    def _drop_branches(self) -> None:
        """Drops the branches of the records before, and those records."""
        self._cache.branches = self._absent = self._unasked = None
        self._live.clear()
        self._expanded.clear()

    def _ask_records(self, request: RecordRequest) -> RecordAnswer:
        """Asks the draft for new records, those of finished prompts among them."""
        moves = request.promotion
        if self._prompted:
            moves = moves._replace(position=moves.position.copy(), pending=moves.pending.copy())
            self._lengths = self._lengths.copy()
        for slot, token in self._prompted.items():
            moves.position[slot], moves.pending[slot] = self._known[slot], token
            self._lengths[slot] = 0
            state = self._states[slot]
            self._later.append(functools.partial(state.begin, 0, "miss", (), made=True))
        slots = [slot for slot, position in enumerate(moves.position.tolist()) if position != IDLE]
        for slot in slots:
            tokens = self._untold.get(slot, ())
            moves.committed[slot, : len(tokens)] = tokens
        self._unasked = None
        self._records = self._draft.record(request._replace(promotion=moves))
        self._prompted.clear()
        for slot in slots:
            self._untold.pop(slot, None)
        self._live.update(slots)
        return self._records

    def _lowered(self, after: After) -> Int32[np.ndarray, "B K"]:
        """D of Saguaro sampling; see `SequenceState.lowered`."""
        lowered = np.zeros((self._draft.slots, self._draft.k), np.int32)
        if self._lowers:
            self._catch_up()
            for slot, each in self._states.items():
                lowered[slot, : self._plan.k] = each.lowered(after, self._plan)
        return lowered

    def _wait(self, this: RoundState) -> None:
        """Waits for more tokens of the branches that were hit, if that pays."""
        branches, lookup, more = self._cache.branches, this.lookup, {}
        if branches is None:
            return
        self._count_won(this, branches)
        if branches.forwards >= self._forwards:
            return
        for slot in this.states:
            # Its tokens once its expansion is complete; branches of k = L start one forward later.
            most = min(self._forwards - (lookup.k[slot] == self._lengths[slot]), this.limit[slot])
            hit = lookup.branch[slot] >= 0
            more[slot] = max(int(most - this.lengths[slot]), 0) if hit else 0
        if not any(more.values()):
            return
        self._work.gather()
        expected = [
            each.expected(int(this.lengths[slot]), more[slot]) for slot, each in this.states.items()
        ]
        usual, underway = self._usual(this), self._work.underway(self._clock())
        forwards = self._pace.worth("branches", expected, usual, underway=underway)
        if not forwards:
            return
        assert self._branches is not None
        self._fill(self._branches.branches(branches.forwards + forwards))
        if self._absent is not None:  # the tokens that came before will do
            self._absent = None
            return
        branches = self._cache.branches
        assert branches is not None
        # The look-up stands: a row that missed has its backup by now.
        this.lookup = lookup._replace(lengths=branches.lengths)
        self._count_won(this, branches)

    def _count_won(self, this: RoundState, branches: BranchTokens) -> None:
        """Counts the tokens of the branches that were hit."""
        for slot in this.states:
            winner = this.lookup.branch[slot]
            if winner >= 0:
                length = min(branches.lengths[slot, winner], this.limit[slot])
                this.lengths[slot] = length

    def _just_in_time(
        self, this: RoundState, missed: list[int]
    ) -> tuple[Row, Int32[np.ndarray, "B K"]]:
        """Number of tokens to wait for in each row, and their D."""
        drafts = np.zeros(self._draft.slots, np.int32)
        nothing = drafts, np.zeros((self._draft.slots, self._draft.k), np.int32)
        if not missed or self._backup not in ("auto", "draft"):
            return nothing
        forwards = int(this.limit[missed].max())
        if self._backup == "auto":
            worth = [this.states[slot].worth(int(this.limit[slot])) for slot in missed]
            forwards = self._pace.worth("record", worth, self._usual(this))
        if not forwards:
            return nothing
        drafts[missed] = np.minimum(forwards, this.limit[missed])
        return drafts, self._lowered("miss")

    def _usual(self, this: RoundState) -> float:
        """Tokens that a round of these rows commits in all, by their recent rounds."""
        return sum(each.stats.usual(int(this.limit[slot])) for slot, each in this.states.items())

    def _work_behind(self, this: RoundState, drafted: Drafted, tokens: int, seconds: float) -> None:
        """Does what no dispatch waits for; see `DraftWork.taken`."""
        drafted.activity = self._work.taken(tokens, seconds)
        self._order.outcome(this.began)
        self.asks_first = self._order.first
        for verified in self._taught:
            self._tuner.observe(verified)
        self._taught.clear()
        self._next_plan = self._tuner.plan(rows=len(drafted.sources), steps=self._pace.steps)
