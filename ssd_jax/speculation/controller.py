"""The controller of SSD: matches verification outcomes against the speculation cache.

Pure host code over integers, in arrays [B, ...] of a batch. A round takes these forms: the outcome
(`DraftBatch`), its look-up in the cache (`CacheLookup`), the promotion of the branches that came
true (`Promotion`), and the proposal (`Drafted`). The proposal has the branches' tokens from the
cache, so the draft is asked for the new records (`RecordRequest`) beside the verification, unless
it is to draft some just in time; then for branches of their outcomes (`ExpansionRequest`), whose
tokens fill the cache (`gather`).

What a round waits for is in `waiting`, what is learned from outcomes in `learning`. Nothing that a
proposal does not need comes before it: `speculate` begins by learning from the round that ended,
and `proposal`, when the target is at work, ends with the draft's report and the next plan.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Int32
from typing_extensions import override

from ssd_jax.roles.handles import ProposalHandle
from ssd_jax.roles.protocols import BranchingDraft, Drafter, RecordAnswer
from ssd_jax.roles.records import (
    IDLE,
    DraftBatch,
    Drafted,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    SlotOpening,
    no_promotion,
    record_request,
)
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.backup import BackupKind, make
from ssd_jax.speculation.cache import SpeculationCache
from ssd_jax.speculation.fan_out import After, FanOut
from ssd_jax.speculation.learning import Learning
from ssd_jax.speculation.sequence_state import RoundState, SequenceState
from ssd_jax.speculation.tuner import FixedTuner, Tuner, teaches
from ssd_jax.speculation.waiting import Waiting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Policies:
    """How SSD speculates.

    Attributes:
      k: most tokens of a proposal, at most the draft's.
      tuner: decides the tokens of a proposal, at most `k`, and M, branches a slot, at most the
        draft's.
      fan_out: makes the policy of a sequence.
      backup: what a miss proposes: "draft" waits for the draft, "auto" as long as that pays.
      tokens: number of ids of the tokenizer.
      lowers: whether the draft's Saguaro sampling uses D, which is computed only then.
      rule: of the verification.
    """

    k: int
    tuner: Tuner
    fan_out: Callable[[], FanOut]
    backup: BackupKind
    tokens: int
    lowers: bool = True
    rule: str = "ratio"


class Controller(Drafter):
    """The drafter of SSD.

    Args:
      draft: runs the branches.
      elsewhere: it has devices of its own.
      asks_first: whether it is asked before the target's forward is dispatched.
      put_off: requests may be preempted, and continue without the branches that they had.
      waiting: decides what to wait for; without it rounds wait for all that they can.
    """

    branches = True

    def __init__(
        self,
        draft: BranchingDraft,
        policies: Policies,
        *,
        elsewhere: bool = False,
        asks_first: bool = False,
        put_off: bool = False,
        waiting: Waiting | None = None,
    ) -> None:
        self._waiting = waiting or Waiting()
        waits = elsewhere or put_off or self._waiting.by_clock
        fixed = isinstance(policies.tuner, FixedTuner)
        self.k, self.on_device, self.asks_first = policies.k, not elsewhere, asks_first
        self.timed = RULES[policies.rule].timed and (waits or not fixed)
        self.timed_in_turn = RULES[policies.rule].timed and (elsewhere or not fixed)
        self._draft, self._policies = draft, policies
        self._learning = Learning(policies.tuner, self._waiting)
        self._states: dict[int, SequenceState] = {}  # by slot
        self._cache = SpeculationCache()
        self._request: RecordRequest | None = None  # of a proposal, which the draft has not had
        self._records: RecordAnswer | None = None
        self._recorded: set[int] = set()  # slots with a record that has no branches yet
        self._round: RoundState | None = None
        self._plan = self._learning.next_plan

    @override
    def open(self, opening: SlotOpening) -> None:
        params, policies = opening.params, self._policies
        self._states[opening.slot] = SequenceState(
            fan_out=policies.fan_out(),
            backup=make(policies.backup, params.seed_of_request, opening.index, policies.tokens),
            room=params.most_tokens,
            teaches=teaches(params.temperature, policies.rule),
            branches=opening.branches,
        )
        # Leftovers of an interrupted step must not reach new requests.
        self._request = None
        self._recorded.clear()
        self._cache.forget(opening.slot)
        self._waiting.forget()
        self._draft.open(opening)

    @override
    def set_pages(self, slot: int, pages: Sequence[int]) -> None:
        self._draft.set_pages(slot, pages)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        """The text counts as a verification with L = 0, whose outcome is the token behind it."""
        self._draft.prefill(slot, tokens, offset)
        state = self._states[slot]
        state.backup.extend(tokens)
        self._learning.forget(slot)
        self._cache.forget(slot)
        if last:
            state.known_position, state.last_prompt_token = offset + len(tokens) - 1, tokens[-1]

    @override
    def gather(self, until: Callable[[], bool]) -> None:
        self._cache.gather(1, until)

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        self._learn()  # of a round that was interrupted
        began = self._waiting.clock()
        if self._cache.absence is None:
            self._cache.gather(1)
        this_round = self._round = self._look_up(batch, began)
        self._wait(this_round)
        request = self._request = self._records_for(this_round)
        # Even if the draft fails, the branches are gone.
        self._cache.drop()
        self._recorded.clear()
        promotion, forwards = request.promotion, int(request.drafts.max())
        tokens, parents = promotion.tokens, promotion.parents
        if forwards:
            began = self._waiting.clock()
            records = self._ask_records(request)
            this_round.lengths = np.where(request.drafts > 0, records.lengths(), this_round.lengths)
            for slot in this_round.states:
                if not this_round.lengths[slot]:  # the draft has not answered
                    this_round.sources.setdefault(slot, "late")
            tokens, parents = records.tokens(), records.parents()
            this_round.waited = forwards, self._waiting.clock() - began
        this_round.drafted = Drafted(
            this_round.lengths,
            tokens,
            this_round.sources,
            this_round.lookup,
            parents=parents,
            chains=[
                slot
                for slot in this_round.states
                if this_round.sources.get(slot) != "hit" and not request.drafts[slot]
            ],
        )
        return this_round.drafted

    @override
    def speculate(self) -> None:
        prompts = any(state.last_prompt_token is not None for state in self._states.values())
        if self._request is not None:
            self._ask_records(self._request)
        elif prompts:
            self._cache.drop()
            self._recorded.clear()
            self._ask_records(record_request(self._no_promotion()))
        self._learn()
        if self._round is not None:
            self._round.begin_records()
        if self._recorded:
            states = {slot: self._states[slot] for slot in sorted(self._recorded)}
            self._expand({slot: state for slot, state in states.items() if state.branches})

    @override
    def proposal(self) -> ProposalHandle:
        assert self._records is not None
        assert self._round is not None
        proposal, this_round = self._records.proposal(), self._round
        self._round = None
        assert this_round.drafted is not None
        this_round.drafted.activity = self._waiting.report(*this_round.waited)
        self._learning.plan(rows=len(this_round.states))
        return proposal

    def _learn(self) -> None:
        """Learns from the outcomes that the round began with."""
        if self._round is not None:
            self._learning.learn(self._round)

    def _look_up(self, batch: DraftBatch, began: float) -> RoundState:
        """Takes the outcomes, each once, and looks them up: by row where they are of trees."""
        states = {slot: self._states[slot] for slot in batch.slots}
        positions, counts = batch.position.tolist(), batch.counts.tolist()
        k = [-1] * self._draft.slots
        for slot, state in states.items():
            if positions[slot] > state.known_position:
                k[slot] = int(batch.node[slot]) if self._draft.nodes else counts[slot] - 1
                state.known_position = positions[slot]
                state.committed = batch.tokens[slot].tolist()
                state.backup.extend(state.committed[: counts[slot]])
        lookup = self._cache.look_up(k, batch.pending.tolist())
        sources: dict[int, str] = {
            slot: "hit" if lookup.branch[slot] >= 0 else self._cache.miss_cause(slot)
            for slot, state in states.items()
            if state.branches
        }
        for slot, state in states.items():
            state.branches, state.limit = bool(batch.branches[slot]), int(batch.limit[slot])
        limit = np.minimum(batch.limit, self._plan.k)
        lengths = np.zeros(len(k), np.int32)
        return RoundState(began, batch, limit, states, sources, lookup, lengths)

    def _records_for(self, this_round: RoundState) -> RecordRequest:
        """Records of the branches that came true, and of backups in all other rows.

        `committed` is still empty.
        """
        missed = [slot for slot, source in this_round.sources.items() if source != "hit"]
        drafts, lowered = self._just_in_time(this_round, missed)
        batch, this_round.branches = this_round.batch, self._cache.branches
        promotion = self._no_promotion()
        tokens, parents = promotion.tokens, promotion.parents
        for slot, state in this_round.states.items():
            state.last_prompt_token = None
            source = this_round.sources.get(slot)
            if source is None:
                this_round.backups[slot] = 0
            elif source != "hit":
                backup = state.backup.propose(
                    int(batch.position[slot]), int(this_round.limit[slot])
                )
                this_round.lengths[slot] = this_round.backups[slot] = len(backup)
                tokens[slot, : len(backup)] = backup
            elif this_round.branches is not None:
                winner, trees = this_round.lookup.branch[slot], this_round.branches.trees
                length = this_round.nodes.get(slot, this_round.lengths[slot])
                tokens[slot, :length] = this_round.branches.tokens[slot, winner, :length]
                if trees is not None and parents is not None:
                    parents[slot, :length] = trees.parents[slot, winner, :length]
        limit = this_round.lengths.copy()
        for slot, count in this_round.nodes.items():
            limit[slot] = count
        promotion = promotion._replace(
            position=batch.position,
            pending=batch.pending,
            winner=this_round.lookup.branch,
            limit=limit,
            node=batch.node if self._draft.nodes else None,
        )
        return RecordRequest(promotion, drafts, lowered)

    def _no_promotion(self) -> Promotion:
        draft = self._draft
        return no_promotion(draft.slots, draft.k, nodes=draft.nodes)

    def _ask_records(self, request: RecordRequest) -> RecordAnswer:
        """Asks the draft for new records, those of finished prompts among them."""
        moves = request.promotion
        states = self._states.items()
        prompts = {slot: state for slot, state in states if state.last_prompt_token is not None}
        if prompts:
            moves = moves._replace(position=moves.position.copy(), pending=moves.pending.copy())
        for slot, state in prompts.items():
            moves.position[slot] = state.known_position
            moves.pending[slot] = state.last_prompt_token
            state.begin(0, "miss", (), has_run=True)
        slots = [slot for slot, position in enumerate(moves.position.tolist()) if position != IDLE]
        for slot in slots:
            tokens = self._states[slot].committed
            moves.committed[slot, : len(tokens)] = tokens
        self._request = None
        self._records = self._draft.record(request._replace(promotion=moves))
        for slot in slots:
            self._states[slot].last_prompt_token, self._states[slot].committed = None, []
        self._recorded.update(slots)
        return self._records

    def _expand(self, rows: dict[int, SequenceState]) -> None:
        """Asks the draft for branches of these rows' records."""
        self._plan = self._learning.next_plan
        self._recorded.clear()
        asking = {slot: state for slot, state in rows.items() if state.asks_confidence}
        if asking and self._records is not None:
            confidence = self._records.confidence()
            for slot, state in asking.items():
                state.confidence = tuple(confidence[slot, : state.length].tolist())
        counts = np.zeros((self._draft.slots, self._draft.k + 1), np.int32)
        follow, longest = np.zeros(self._draft.slots, bool), 0
        for slot, state in rows.items():
            count_outcomes = state.tree_counts if self._draft.nodes else state.forks
            forks = count_outcomes(self._plan.budget)
            if forks is not None:
                counts[slot, : len(forks)], follow[slot] = forks, not state.has_run
                longest = max(longest, state.most_forwards())
        if not counts.any():
            return
        forwards = min(self._plan.forwards, longest)
        if self._draft.nodes:  # behind a leaf nothing starts late
            forwards = min(forwards, self._draft.k)
        lowered = self._lowered("hit")
        answer = self._draft.expand(ExpansionRequest(counts, follow, lowered, forwards))
        self._cache.prepare(counts, answer, forwards)
        self._waiting.expands(self._plan.budget)

    def _lowered(self, after: After) -> Int32[np.ndarray, "B K"]:
        """D of Saguaro sampling; see `SequenceState.lowered`."""
        lowered = np.zeros((self._draft.slots, self._draft.k), np.int32)
        if self._policies.lowers:
            self._learn()
            for slot, state in self._states.items():
                if state.branches:
                    lowered[slot, : self._plan.k] = state.lowered(after, self._plan)
        return lowered

    def _wait(self, this_round: RoundState) -> None:
        """Waits for more tokens of the branches that were hit, if that pays."""
        branches, lookup, planned = self._cache.branches, this_round.lookup, self._cache.forwards
        if branches is None:
            return
        this_round.count_won(branches)
        if branches.forwards >= planned:
            return
        missing: dict[int, int] = {}
        for slot, state in this_round.states.items():
            # Its tokens once its expansion is complete; branches of k = L start one forward later,
            # if they are chains.
            later = not self._draft.nodes and lookup.k[slot] == state.length
            limit = min(planned - later, this_round.limit[slot])
            hit = lookup.branch[slot] >= 0
            missing[slot] = max(int(limit - this_round.lengths[slot]), 0) if hit else 0
        forwards = self._waiting.more_forwards(this_round, missing) if any(missing.values()) else 0
        if not forwards:
            return
        self._cache.gather(branches.forwards + forwards)
        if self._cache.absence is not None:  # the tokens that came before will do
            self._cache.absence = None
            return
        branches = self._cache.branches
        assert branches is not None
        # The look-up stands: a row that missed has its backup by now.
        this_round.lookup = lookup._replace(lengths=branches.lengths)
        this_round.count_won(branches)

    def _just_in_time(
        self, this_round: RoundState, missed: Sequence[int]
    ) -> tuple[Row, Int32[np.ndarray, "B K"]]:
        """Number of tokens to draft and wait for in each row, and their D.

        Rows that were to have no branches get all that they may.
        """
        drafts = np.zeros(self._draft.slots, np.int32)
        in_turn = [slot for slot in this_round.states if slot not in this_round.sources]
        drafts[in_turn] = this_round.limit[in_turn]
        forwards, kind = 0, self._policies.backup
        if missed and kind == "draft":
            forwards = int(this_round.limit[missed].max())
        elif missed and kind == "auto":
            forwards = self._waiting.just_in_time(this_round, missed)
        if forwards:
            drafts[missed] = np.minimum(forwards, this_round.limit[missed])
        if not drafts.any():
            return drafts, np.zeros((self._draft.slots, self._draft.k), np.int32)
        return drafts, self._lowered("miss")
