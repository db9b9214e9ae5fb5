"""Records rounds: in the metrics of their requests, and in the trace."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from ssd_jax.engine.request import FinishReason, TokenEvent
from ssd_jax.engine.requests.metrics import RoundRecord, prepared_bonus, row_lookup
from ssd_jax.engine.requests.state import RequestState
from ssd_jax.engine.rounds.monitor import RoundMonitor
from ssd_jax.engine.rounds.timer import RoundTimer
from ssd_jax.engine.rounds.trace import EngineTrace, RowTrace
from ssd_jax.roles.activity import DraftCost, TargetTimes
from ssd_jax.roles.protocols import Pending
from ssd_jax.roles.records import ABSENCES, Drafted, Outcomes, Row


class CommittedRow(NamedTuple):
    """A row of an outcome that was read.

    Attributes:
      tokens: the emitted tokens that were committed.
      reason: why they were the last; None where more may follow.
    """

    row: int
    state: RequestState
    tokens: list[int]
    reason: FinishReason | None


@dataclasses.dataclass(frozen=True)
class InFlight:
    """A dispatched program, and the requests whose rows count.

    Attributes:
      rows: rows of the outcome.
      prompt: tokens of the prompt that it finishes; 0 in a round.
      dispatched: when its forward was dispatched, in seconds; 0 where an earlier outcome is read
        after that.
      drafted: the proposal that the round verifies.
      branches: rows for which branches were prepared, by slot, where there is a proposal.
      mode: "ar" where rounds propose tokens for none of its requests, "ssd" where branches are
        prepared for one, else "sd".
      costs: cost of the proposal to a draft with devices of its own, by slot.
      committed: its committed rows, once the outcome was read.
    """

    pending: Pending
    rows: list[tuple[int, RequestState]]
    prompt: int = 0
    dispatched: float = 0.0
    drafted: Drafted | None = None
    branches: Row | None = None
    mode: str = "ar"
    costs: dict[int, DraftCost] = dataclasses.field(default_factory=dict)
    committed: list[CommittedRow] = dataclasses.field(default_factory=list)

    def read_prompts(self) -> None:
        """Waits for the log-probabilities of a prompt that it finishes, if they were asked for."""
        for _, state in self.rows if self.prompt else ():
            if state.prompt_logprobs is not None:
                state.prompt_logprobs.read()


class RoundLog:
    """Collects times and outcomes, and evaluates them once the next round is dispatched.

    Args:
      clock: seconds, monotonic.
      trace: None records no trace.
      plain_trace: has the rounds of requests without a draft; None is `trace`.
      timer: None reports no rounds.

    Attributes:
      monitor: what the rounds have done, for other threads.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        trace: EngineTrace | None,
        timer: RoundTimer | None = None,
        plain_trace: EngineTrace | None = None,
    ) -> None:
        self._clock, self._timer, self.monitor = clock, timer, RoundMonitor()
        self._trace, self._plain_trace = trace, plain_trace or trace
        self._host_trace = trace  # has the host's lane of the last step
        self._times, self._until = TargetTimes(), 0.0
        self._marks: list[tuple[str | None, float]] = []
        self._read: deque[tuple[InFlight, Outcomes, tuple[float, float]]] = deque()

    def begin(self, in_flight: Sequence[InFlight]) -> None:
        """Marks that a step begins, with these programs in flight."""
        self.mark(None)
        if self._timer is not None and in_flight and in_flight[0].pending.ready():
            self._timer.apart()

    def mark(self, name: str | None) -> None:
        """Ends a slice of the host's lane in the trace, named `name`."""
        if self._trace is not None:
            self._marks.append((name, self._clock()))

    def idle(self) -> None:
        """Marks that no dispatched program will be read."""
        self._times.idle()

    def dispatched(self) -> float:
        """Marks that a program of the target is dispatched now; returns the time in seconds."""
        now = self._clock()
        self._times.dispatched(now)
        return now

    def prompt(self) -> None:
        """Marks that the target is given a part of a prompt now."""
        self.dispatched()
        if self._timer is not None:
            self._timer.apart()

    def read(self, flight: InFlight, outcomes: Outcomes, now: float, *, more: bool) -> None:
        """Takes the outcome of a program, read at `now`; `in_flight` if another is in flight."""
        self._read.append((flight, outcomes, self._times.read(now, in_flight=more)))
        if self._timer is not None:
            states = () if flight.prompt else [state for _, state in flight.rows]
            requests = [state.request_id for state in states]
            rows = [row for row, _ in flight.rows]
            self._timer.read(
                requests,
                flight.drafted,
                now,
                tokens=len(rows) + int(outcomes.accepted[rows].sum()),
                mode=flight.mode,
                reach=max(rows, default=0) + 1,
                batch=outcomes.batch,
            )

    def evaluate(self, in_flight: Iterable[InFlight], running: Mapping[int, RequestState]) -> None:
        """Evaluates the outcomes that were read, and charges the draft's work.

        The work is charged to the rounds that it was for, or to requests that are still prefilling.
        """
        for name, now in self._marks:
            if name is None:  # a step begins; the marks before are of the one before
                self._host_trace = self._trace_of(running.values())
            if self._host_trace is not None:
                self._host_trace.host(name, now)
        self._marks.clear()
        while self._read:
            self._record(*self._read.popleft())
        for flight in in_flight:
            drafted = flight.drafted
            if drafted is None or drafted.activity is None or flight.costs:
                continue
            for slot, state in flight.rows:
                flight.costs[slot] = self._times.cost(slot, drafted.activity)
                if drafted.sources.get(slot) not in ABSENCES:  # else it may have worked unheard
                    state.times.drafted(drafted.activity.spans, self._until)
            for slot, state in running.items():
                if slot not in flight.costs:
                    state.times.prefills.append(self._times.cost(slot, drafted.activity))
            spans = drafted.activity.spans
            if spans:
                self.monitor.draft(spans, self._times.hidden(spans))
            if self._trace is not None:
                self._trace.draft(spans)

    def text(self, event: TokenEvent) -> None:
        """Adds text to the trace, in the request's last round."""
        for trace in dict.fromkeys((self._trace, self._plain_trace)):
            if trace is not None:
                trace.text(event.request_id, event.spans, last=event.output is not None)

    def _trace_of(self, states: Iterable[RequestState]) -> EngineTrace | None:
        """The lanes of rounds with these requests."""
        proposed = [state.most_proposed for state in states]
        return self._trace if any(proposed) or not proposed else self._plain_trace

    def _record(self, flight: InFlight, outcomes: Outcomes, span: tuple[float, float]) -> None:
        traced, records, drafted, (began, now) = [], [], flight.drafted, span
        self._until = now
        for row, state, tokens, _ in flight.committed:
            accepted = int(outcomes.accepted[row])
            record = RoundRecord(
                committed=accepted + 1,
                accepted=accepted,
                seconds=now - max(began, flight.dispatched),
                read=now,
                cost=flight.costs.get(row),
                mode=flight.mode,
                batch=outcomes.batch,
            )
            if drafted is not None:
                record.proposed, record.source = int(drafted.lengths[row]), drafted.sources.get(row)
                prepared = flight.branches is not None and flight.branches[row]
                record.mode = "ssd" if prepared and record.source is not None else "sd"
                record.lookup = row_lookup(drafted.lookup, row, record.proposed)
                record.tree = None if drafted.parents is None else row not in drafted.chains
            facts = record.source, record.proposed, accepted
            traced.append(RowTrace(row, state.request_id, *facts, tokens))
            if self._trace is not None and drafted is not None:
                prepared = prepared_bonus(drafted.lookup, row)
                traced[-1] = traced[-1]._replace(prepared=prepared)
            state.record(outcomes, row, tokens, record)
            records.append(record)
        if flight.prompt:
            self.monitor.prefill(span, flight.prompt, len(records))
        else:
            self.monitor.round(span, records, flight.mode)
        trace = self._trace_of(state for _, state in flight.rows)
        if trace is None:
            return
        if flight.prompt:
            trace.prefill(span, flight.rows[0][1].request_id, flight.prompt)
        else:
            trace.round(span, traced)
