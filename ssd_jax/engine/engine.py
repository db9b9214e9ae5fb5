"""The engine: requests enter and leave slots between rounds; one `step` is one round.

`Engine._round` has the order of the roles' calls. It waits only for the outcome of the round in
flight, and for drafted tokens where that pays; once the next round is dispatched, tokens are turned
into text, stop strings are searched for and events are handed out. A round dispatched past a stop
is discarded before anything counts it.

Whatever raises within a step, nothing is taken twice and no event is lost: an outcome counts once
it is read whole, an event is made once and kept until it is handed out, and a role is asked again
for what it has not confirmed. After a `DeviceError` the roles cannot be asked again: every request
ends with what it has.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from ssd_jax.engine.draft_prefill import DraftPrefill
from ssd_jax.engine.event_reports import EventReports
from ssd_jax.engine.planner import Planner, RoundPlan
from ssd_jax.engine.prompt_reader import PromptReader
from ssd_jax.engine.request import Request, TokenEvent
from ssd_jax.engine.requests.metrics import RequestTimes
from ssd_jax.engine.requests.occurrences import Occurrences
from ssd_jax.engine.requests.sequence import Sequence, check, require_one_text
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.requests.stop_strings import open_text
from ssd_jax.engine.rounds.batches import RoundBatches
from ssd_jax.engine.rounds.log import CommittedRow, InFlight, RoundLog
from ssd_jax.engine.rounds.masks import round_masks
from ssd_jax.engine.rounds.monitor import RoundMonitor
from ssd_jax.engine.rounds.timer import RoundTimer
from ssd_jax.engine.rounds.trace import EngineTrace
from ssd_jax.engine.slots.openings import Openings
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.engine.slots.seats import EngineLoad, Seats
from ssd_jax.errors import DeviceError, InputError
from ssd_jax.roles.protocols import Drafter, Target
from ssd_jax.roles.records import IDLE, Outcomes
from ssd_jax.sampling.params import NO_TOKEN, SamplingParams

if TYPE_CHECKING:
    from ssd_jax.checkpoints.tokenizers.detokenizer import OpenStream

_LOG = logging.getLogger(__name__)


class Engine:
    """Continuous batching over a target role.

    One thread at a time may call it; only `add` may be called during a `step`.

    Args:
      target: device programs behind the `Target` protocol.
      decoder: makes an incremental detokenizer for the text after a prompt's last token.
      eos_ids: all end-of-sequence ids of the checkpoint.
      drafter: proposes tokens for the target to verify; None decodes one token a round.
      clock: seconds, monotonic.
      trace: records when things happen; None records nothing.
      plain_trace: records it of requests without a draft; None is `trace`.
      occurrences: shared by all engines that share a clock; None counts this engine's own.
      setup: metrics that are the same for every request.
      pages: the stock of pages that slots share; None where each slot has its own.
      timer: reports what rounds take; None reports nothing.
      prepare: loads the programs that a request's parameters need, if need be.
      planner: decides when rounds do without the drafter, for requests that give no K of their own;
        None never does.
    """

    def __init__(
        self,
        target: Target,
        decoder: OpenStream,
        eos_ids: frozenset[int],
        *,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: EngineTrace | None = None,
        plain_trace: EngineTrace | None = None,
        occurrences: Occurrences | None = None,
        setup: Mapping[str, Any] | None = None,
        pages: PageStock | None = None,
        timer: RoundTimer | None = None,
        prepare: Callable[[SamplingParams], None] = lambda _params: None,
        planner: Planner | None = None,
    ) -> None:
        self._target, self._drafter = target, drafter
        self._roles: list[Target | Drafter] = [target] if drafter is None else [target, drafter]
        self._decoder, self._eos_ids = decoder, eos_ids
        self._clock, self._log = clock, RoundLog(clock, trace, timer, plain_trace)
        self._setup = setup or {}
        self.prepare, self._seats = prepare, Seats(target.slots, pages)
        self._running = self._seats.running
        self.k = 0 if drafter is None else drafter.k
        """Most tokens that a round proposes for a row."""
        self.branches = drafter is not None and drafter.branches
        """Whether its draft prepares branches, as mode ssd does."""
        self._planner, self._plan = planner, RoundPlan(self.k)
        self._draft_prefill = None if drafter is None else DraftPrefill(drafter, target.max_chunk)
        self._batches = RoundBatches(target.slots, self.k)
        self._ids = itertools.count()
        self._in_flight: deque[InFlight] = deque()
        self._reports = EventReports(self._seats, self._log)
        self._prompts = PromptReader(
            target,
            self._roles,
            self._draft_prefill,
            seats=self._seats,
            openings=Openings(drafter, planner, occurrences or Occurrences(), target.context),
            log=self._log,
            reports=self._reports,
            in_flight=self._in_flight,
        )
        self.broken: str | None = None
        """Why no further step can run; None while one can."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        return bool(self._seats.waiting or self._running or self._reports.due)

    @property
    def monitor(self) -> RoundMonitor:
        """What its rounds have done; any thread may ask it."""
        return self._log.monitor

    @property
    def load(self) -> EngineLoad:
        """How busy it is now; any thread may ask."""
        used, pages = self._seats.pages
        return EngineLoad(len(self._running), len(self._seats.waiting), used, pages)

    def add(self, request: Request) -> int:
        """Queues a request; it enters a free slot between rounds.

        Raises:
          InputError: an empty prompt, a prompt that leaves no room in the context, too many stop
            ids, several texts, or more proposed tokens than the engine has.
          DeviceError: the engine is broken.
        """
        self._refuse_broken()
        check(request, self._eos_ids, self._target.context)
        require_one_text(request)
        if request.k is not None and not 0 <= request.k <= self.k:
            raise InputError(f"k = {request.k} is out of range; this engine has 0 to {self.k}")
        if request.branches and not self.branches:
            raise InputError(
                "branches = True: the draft of this engine prepares none; leave it out"
            )
        self.prepare(request.params)
        most_proposed = self.k if request.k is None else request.k
        names = self._seats.names(request, drafted=most_proposed > 0)
        state = RequestState(
            request_id=next(self._ids),
            request=request,
            sequence=Sequence(request, eos_ids=self._eos_ids, context=self._target.context),
            text=open_text(request, self._decoder),
            times=RequestTimes(
                arrived=self._clock(),
                speculative=most_proposed > 0,
                shared_device=bool(most_proposed and self._drafter and self._drafter.on_device),
                setup={**self._setup, **self._mode_of(request)},
                planned=self._planner is not None and request.k is None,
            ),
            page_names=names,
            most_proposed=most_proposed,
        )
        self._seats.waiting.add(state)
        return state.request_id

    def _mode_of(self, request: Request) -> dict[str, str]:
        """The metric `mode` of a request that does not have the engine's."""
        if self._drafter is not None and request.k == 0:
            return {"mode": "ar"}
        if request.branches is not None:
            return {"mode": "ssd" if request.branches else "sd"}
        # By its K it is drafted for, which mode auto may have found slower.
        return {"mode": "ssd" if self.branches else "sd"} if request.k else {}

    def cancel(self, request_id: int, *, silent: bool = False) -> None:
        """Ends a request; unless `silent`, `step` returns its last event.

        Unknown or ended ids are ignored.
        """
        for state in itertools.chain(self._running.values(), self._seats.waiting):
            if state.request_id == request_id and not state.finished:
                self._reports.cancel(state, silent=silent)
                return

    def step(self) -> list[TokenEvent]:
        """Runs one round; returns the events of the round before.

        If a step raises, the next step returns its events. If a device fails, all requests end
        with the reason "error", and the step after that raises.

        Raises:
          DeviceError: the engine is broken; the model must be opened again.
        """
        if not self.has_work:
            self._refuse_broken()
        try:
            if self.broken is None:
                self._round()
        except DeviceError as error:
            self.broken = f"a device has failed: {error}; open the model again"
            _LOG.error(self.broken)
        self._report()
        return self._reports.take()

    def _round(self) -> None:
        """Reads the outcome of the round in flight and dispatches the next round."""
        target = self._target
        self._plan_round()
        if not self._running:
            self._in_flight.clear()  # belongs to no request
        self._log.begin(self._in_flight)
        ahead = self._look_ahead()
        while len(self._in_flight) > ahead:
            flight = self._in_flight[0]
            if self._drafter is not None and self._speculates:
                self._drafter.gather(flight.pending.ready)
            outcomes = flight.pending.read()
            flight.read_prompts()
            self._commit(outcomes)
        self._log.mark("read")
        if ahead:
            return
        self._grow()
        self._prompts.read(self._plan)
        self._log.mark("admit")

        drafter = self._drafter if self._speculates else None
        rows = self._decoding_rows()
        if rows:
            if self._draft_prefill is not None:
                self._draft_prefill.catch_up(state for _, state in rows)
            pending_tokens, lengths, batch = self._batches.make(rows)
            drafted = None
            if drafter is not None and batch.limit.any():
                drafted = drafter.propose(batch)
            DraftPrefill.proposes(rows, () if drafted is None else batch.slots)
            self._log.mark("propose")
            asks_first = drafter is not None and drafter.asks_first
            if drafter is not None and asks_first:
                drafter.speculate()
            dispatched = self._log.dispatched()
            logits = target.forward(pending_tokens, lengths, drafted)
            if drafter is not None and not asks_first:
                drafter.speculate()
            proposal = None if drafter is None or drafted is None else drafter.proposal()
            masks = round_masks(rows, target.slots, target, drafted, self._reports.fail)
            outcome = target.accept(logits, proposal, *(() if masks is None else (masks,)))
            dispatch = {"dispatched": dispatched, "drafted": drafted, "branches": batch.branches}
            self._in_flight.append(
                InFlight(outcome, rows, mode="ar" if drafter is None else self._mode, **dispatch)
            )
        elif drafter is not None:
            drafter.speculate()
        self._log.mark("dispatch")

    @property
    def _mode(self) -> str:
        """The mode that rounds with the draft are of now."""
        branching = any(state.k and state.branches for state in self._running.values())
        return "ssd" if branching and self.branches else "sd"

    @property
    def _speculates(self) -> bool:
        """Whether rounds propose tokens for a request that runs."""
        return any(state.k for state in self._running.values())

    def _plan_round(self) -> None:
        """Decides how rounds speculate from now on."""
        if self._planner is not None:
            self._plan = self._planner.plan(self._seats.reach)
        for state in self._running.values():
            state.follow(self._plan)

    def _look_ahead(self) -> bool:
        """Dispatches the round after the one in flight, whose tokens are not known yet.

        The row of a request that ends in the round in flight is discarded. Only while no request is
        drafted for, or is to be admitted.

        Returns: whether such a round was dispatched.
        """
        if self._speculates or len(self._in_flight) != 1:
            return False
        if self._in_flight[0].prompt or self._in_flight[0].drafted is not None:
            return False  # it commits a number of tokens that is not known
        if any(state.sequence.grammar is not None for state in self._running.values()):
            return False  # its tokens decide what may follow
        admits = self._seats.waiting and len(self._running) < self._target.slots
        if admits or not self._seats.prefilled or not self._grow(puts_off=False):
            return False
        flight = self._in_flight[0]
        # There must be room for one more token after the one in flight.
        running_rows = [row for row in flight.rows if not row[1].finished]
        rows = [(slot, state) for slot, state in running_rows if state.sequence.room > 1]
        lengths = np.full(self._target.slots, IDLE, np.int32)
        for slot, state in rows:
            lengths[slot] = state.sequence.cached + 1
        if rows:
            DraftPrefill.proposes(rows, ())
            logits = self._target.forward(flight.pending.bonus, lengths)
            self._in_flight.append(InFlight(self._target.accept(logits), rows))
            self._log.mark("dispatch")
        return bool(rows)

    def _report(self) -> None:
        """Makes the events that are due."""
        self._log.evaluate(self._in_flight, self._running)
        if self.broken is not None:
            self._in_flight.clear()
            for state in self._seats.all:
                self._reports.fail(state)
        self._reports.make()
        self._log.mark("text")

    def _commit(self, outcomes: Outcomes) -> None:
        """Commits the outcomes of the first program in flight."""
        flight = self._in_flight.popleft()
        now = self._clock()
        self._log.read(flight, outcomes, now, more=bool(self._in_flight))
        accepted, emitted = outcomes.accepted.tolist(), outcomes.tokens.tolist()
        nodes = accepted if outcomes.node is None else outcomes.node.tolist()
        for row, state in flight.rows:
            if state.finished:
                continue
            row_tokens, state.node = emitted[row][: accepted[row] + 1], nodes[row]
            sound = row_tokens[-1] != NO_TOKEN
            try:
                tokens = state.commit(row_tokens if sound else row_tokens[:-1], now)
            except Exception as error:
                self._reports.fail(state, error)
                continue
            if state.finished:
                self._seats.leave(state)
            if tokens or sound:
                committed_row = CommittedRow(row, state, tokens, state.sequence.finish_reason)
                flight.committed.append(committed_row)
                self._reports.commit(committed_row)
            if not sound and not state.finished:
                self._reports.fail(state, state.no_token)

    def _grow(self, *, puts_off: bool = True) -> bool:
        """Takes pages for the next round and tells the roles of them; see `Seats.grow`."""
        complete = self._seats.grow(puts_off=puts_off)
        for state, pages in self._seats.grown():
            for role in self._roles:
                role.set_pages(state.slot, pages)
            state.pages = state.times.kv_pages = len(pages)
        return complete

    def _decoding_rows(self) -> list[tuple[int, RequestState]]:
        """Slots whose pending token is known and whose pages hold all tokens before it."""
        running = self._running.items()
        return [row for row in running if row[1].sequence.output and row[1].sequence.prefilled]

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise DeviceError(self.broken)
