"""The engine: requests enter and leave slots between rounds; one `step` is one round.

Order within a step, which keeps the device busy: read the outcome of the round in flight (the only
wait), commit integers, dispatch a prefill chunk, the proposals and the next round, let the drafter
work ahead, and only then turn tokens into text, look for stop strings and hand out events. A round
dispatched past a stop string is discarded before anything counts it. Autoregressive decoding is the
same loop without a drafter.

Whatever raises within a step, nothing is taken twice and no event is lost: outcomes count once they
are read whole, an event is made once and kept until it is handed out, and what a role has not
confirmed it is asked again. Interrupts wait until the step is over. After a `DeviceError` nothing
is left to ask: every request ends with what it has.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ssd_jax.errors import DeviceError
from ssd_jax.interrupts import Deferred
from ssd_jax.runtime.activity import Activity, TargetTimes
from ssd_jax.runtime.job import Job
from ssd_jax.runtime.metrics import Plan, RequestTimes
from ssd_jax.runtime.occurrences import Occurrences
from ssd_jax.runtime.request import FinishReason, Request, SamplingParams, TokenEvent
from ssd_jax.runtime.roles import ABSENCES, IDLE, Drafted, Drafter, DraftRow, Pending, Target
from ssd_jax.runtime.sequence import Sequence, check
from ssd_jax.runtime.stop_strings import IncrementalDecoder, Released, TextStream
from ssd_jax.runtime.trace import EngineTrace, RowTrace

_LOG = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class _InFlight:
    """A dispatched program and the jobs whose rows count.

    Attributes:
      prompt: tokens of the prompt that it finishes; 0 in a round.
      activity: see `Drafted.activity`.
    """

    pending: Pending
    rows: list[tuple[int, Job, Plan]]
    dispatched: float
    prompt: int = 0
    activity: Activity | None = None


class Engine:
    """Continuous batching over a target role. One thread at a time may call; `add` alone may be
    called beside a `step`.

    Args:
      target: device programs behind the `Target` protocol.
      decoder: makes an incremental detokenizer for one request.
      eos_ids: all end-of-sequence ids of the checkpoint.
      drafter: proposes tokens for the target to verify; None decodes one by one.
      clock: seconds, monotonic.
      trace: takes down what happens when; None where nobody looks.
      mode: its name, for the metrics.
      occurrences: of the requests of all engines that share a clock; None are those of this one.
      setup: metrics that are the same for every request.
    """

    def __init__(
        self,
        target: Target,
        decoder: Callable[[], IncrementalDecoder],
        eos_ids: frozenset[int],
        *,
        drafter: Drafter | None = None,
        clock: Callable[[], float] = time.perf_counter,
        trace: EngineTrace | None = None,
        mode: str | None = None,
        occurrences: Occurrences | None = None,
        setup: Mapping[str, Any] | None = None,
    ) -> None:
        self._target = target
        self._drafter = drafter
        self._decoder = decoder
        self._eos_ids = eos_ids
        self._clock = clock
        self._trace = trace
        self._mode = mode
        self._occurrences = occurrences or Occurrences()
        self._setup = setup or {}
        self._ids = itertools.count()
        self._waiting: deque[Job] = deque()
        self._running: dict[int, Job] = {}  # by slot
        self._in_flight: deque[_InFlight] = deque()
        self._times = TargetTimes()
        # Tokens, and whether they were the last, that are not yet events.
        self._committed: deque[tuple[Job, list[int], FinishReason | None]] = deque()
        self._cut_off: deque[tuple[Job, FinishReason]] = deque()
        self._events: list[TokenEvent] = []  # not yet handed out
        self.broken: str | None = None
        """Why no step can follow; None while one can."""

    @property
    def has_work(self) -> bool:
        """Whether `step` has anything to do or to report."""
        left = self._committed or self._cut_off or self._events
        return bool(self._waiting or self._running or left)

    def add(self, request: Request) -> int:
        """Queues a request; it enters a free slot between rounds.

        Raises:
          InputError: an empty prompt, one that leaves no room in the context, or too many stop ids.
          DeviceError: the engine is broken.
        """
        self._refuse_broken()
        check(request, self._eos_ids, self._target.context)
        job = Job(
            request_id=next(self._ids),
            request=request,
            text=TextStream(self._decoder(), request.params.stop, request.params.min_tokens),
            times=RequestTimes(
                arrived=self._clock(),
                mode=self._mode,
                speculative=self._drafter is not None,
                shared_device=self._drafter is not None and self._drafter.traits.on_device,
                setup=self._setup,
            ),
        )
        self._waiting.append(job)
        return job.request_id

    def cancel(self, request_id: int, *, silent: bool = False) -> None:
        """Ends a request; its last event follows from `step`, unless it is to end silently. Unknown
        or ended ids are ignored."""
        for job in [*self._waiting, *self._running.values()]:
            if job.request_id == request_id and not job.finished:
                if not silent:
                    self._cut_off.append((job, "cancelled"))
                if job.sequence is None:
                    self._waiting.remove(job)
                else:
                    self._end(job, "cancelled")
        if silent and not self._running:
            self._in_flight.clear()  # it is nobody's

    def step(self) -> list[TokenEvent]:
        """Runs one round; returns what became known of the one before.

        Where it raises, what is known is returned by the next one. If a device fails, all requests
        end with the reason "error", and the step after that raises.

        Raises:
          DeviceError: the engine is broken; the model must be opened again.
        """
        with Deferred() as interrupts:
            if not self.has_work:
                self._refuse_broken()
            try:
                if self.broken is None:
                    self._round()
            except DeviceError as error:
                self._break(f"a device has failed: {error}")
            except BaseException:
                if interrupts.forced:
                    self._break("a round was cut off by an interrupt")
                raise
            self._report()
        # Interrupts come here, and find the events in their place.
        events, self._events = self._events, []
        return events

    def _round(self) -> None:
        self._mark(None)
        self._collect()
        self._mark("read")
        self._admit()
        self._dispatch_prefill()
        self._prompt_drafter()
        self._mark("admit")
        self._dispatch_forward()
        if self._drafter is not None:
            self._drafter.speculate()
        self._mark("dispatch")
        self._account()

    def _report(self) -> None:
        """Turns what is known into events; an error of one request's text ends that one alone."""
        if self.broken is not None:
            self._in_flight.clear()
            for job in [*self._running.values(), *self._waiting]:
                self._fail(job)
        while self._committed:
            job, tokens, reason = self._committed.popleft()
            if job.ended:
                continue
            try:
                event = self._event(job, tokens, reason)
            except Exception as error:
                self._fail(job, error)
                continue
            if event.token_ids or event.text or event.output:
                self._events.append(event)
        while self._cut_off:
            job, reason = self._cut_off.popleft()
            if not job.ended:
                self._events.append(job.cut_off(reason))
        self._mark("text")

    def _collect(self) -> None:
        while self._in_flight:
            outcomes = self._in_flight[0].pending.read()
            flight = self._in_flight.popleft()
            now = self._clock()
            span = self._times.read(now, more=bool(self._in_flight))
            traced = []
            for row, job, plan in flight.rows:
                if job.sequence is None or job.finished:
                    continue
                seconds = now - flight.dispatched
                try:
                    tokens = job.commit(outcomes, row, plan, seconds, now)
                except Exception as error:
                    self._fail(job, error)
                    continue
                if job.finished:
                    self._running.pop(job.sequence.slot)
                self._committed.append((job, tokens, job.sequence.finish_reason))
                if self._trace is not None:
                    slot, accepted = job.sequence.slot, int(outcomes.accepted[row])
                    traced.append(
                        RowTrace(slot, job.request_id, plan.source, plan.proposed, accepted, tokens)
                    )
            if self._trace is not None:
                if flight.prompt:
                    self._trace.prefill(span, flight.rows[0][1].request_id, flight.prompt)
                else:
                    self._trace.round(span, traced)

    def _admit(self) -> None:
        if not self._running:
            self._times.idle()
        free = [slot for slot in range(self._target.slots) if slot not in self._running]
        for slot in free:
            if not self._waiting:
                return
            job, context = self._waiting[0], self._target.context
            sequence = Sequence(job.request, slot, eos_ids=self._eos_ids, context=context)
            params = self._keyed(job.request)
            banned = sorted(sequence.stop_ids) if params.min_tokens else []
            ban_before = min(len(job.request.prompt_ids) + params.min_tokens, context)
            try:
                for role in self._roles():
                    role.open(slot, params, job.request.index, banned, ban_before)
            except DeviceError:
                raise
            except Exception as error:
                self._fail(job, error)
                continue
            job.sequence = sequence
            self._running[slot] = self._waiting.popleft()

    def _keyed(self, request: Request) -> SamplingParams:
        """How a request that begins is sampled: with noise of its own where lengths are timed."""
        params = request.params
        if params.temperature == 0:
            return params
        seed = self._occurrences.seed(params.seed, request.index)
        timed = self._drafter is not None and self._drafter.traits.timed
        return dataclasses.replace(params, seed=seed) if timed else params

    def _dispatch_prefill(self) -> None:
        """One chunk a step, oldest request first, so that running requests are not held up."""
        unfinished = [
            (job.request_id, job, job.sequence)
            for job in self._running.values()
            if job.sequence is not None and not job.sequence.prefilled
        ]
        if not unfinished:
            return
        _, job, sequence = min(unfinished, key=lambda item: item[0])
        prompt = job.request.prompt_ids
        end = min(sequence.cached + self._target.max_chunk, len(prompt))
        chunk = prompt[sequence.cached : end]
        now = self._clock()
        self._times.dispatched(now)
        if end < len(prompt):
            self._target.prefill(sequence.slot, chunk, sequence.cached)
        else:
            pending = self._target.prefill_last(sequence.slot, chunk, sequence.cached)
            self._in_flight.append(_InFlight(pending, [(0, job, Plan())], now, len(prompt)))
        sequence.cached = end

    def _prompt_drafter(self) -> None:
        """Gives the drafter what the target has of the prompts."""
        if self._drafter is None:
            return
        for slot, job in self._running.items():
            assert job.sequence is not None
            prompt, most = job.request.prompt_ids, self._target.max_chunk
            known = min(job.sequence.cached, len(prompt))
            for begin in range(job.prompted, known, most):
                end = min(begin + most, known)
                last = end == len(prompt)
                self._drafter.prefill(slot, prompt[begin:end], begin, last=last)
                job.prompted = end

    def _dispatch_forward(self) -> None:
        tokens = np.zeros(self._target.slots, np.int32)
        lengths = np.full(self._target.slots, IDLE, np.int32)
        jobs = []
        for slot, job in self._running.items():
            sequence = job.sequence
            if sequence is not None and sequence.output:
                tokens[slot], lengths[slot] = sequence.pending, sequence.cached
                jobs.append((slot, job))
        if not jobs:
            return
        drafted, told = self._propose([job for _, job in jobs])
        self._mark("propose")
        activity = None if drafted is None else drafted.activity
        rows = [(slot, job, _plan(drafted, slot)) for slot, job in jobs]
        now = self._clock()
        self._times.dispatched(now)
        pending = self._target.forward(tokens, lengths, drafted)
        self._in_flight.append(_InFlight(pending, rows, now, activity=activity))
        for job, row in told:  # only now: what a failed drafter did not take, it is told again
            job.told += len(row.committed)

    def _propose(self, jobs: list[Job]) -> tuple[Drafted | None, list[tuple[Job, DraftRow]]]:
        """Proposals, and what the drafter was told for them."""
        if self._drafter is None:
            return None, []
        told = [(job, row) for job in jobs if (row := job.draft_row(self._drafter.k)) is not None]
        if not told:
            return None, []
        return self._drafter.propose([row for _, row in told]), told

    def _account(self) -> None:
        """Charges the draft's work to the rounds that it was for."""
        for flight in self._in_flight:
            if flight.activity is not None:
                for slot, job, plan in flight.rows:
                    plan.cost = self._times.cost(slot, flight.activity)
                    if plan.source not in ABSENCES:  # else it may have worked without a word
                        job.times.drafted(flight.activity.spans)
                if self._trace is not None:
                    self._trace.draft(flight.activity.spans)

    def _mark(self, what: str | None) -> None:
        """Ends what the host was doing, in the trace."""
        if self._trace is not None:
            self._trace.host(what, self._clock())

    def _roles(self) -> list[Target | Drafter]:
        return [self._target] if self._drafter is None else [self._target, self._drafter]

    def _event(self, job: Job, tokens: list[int], reason: FinishReason | None) -> TokenEvent:
        released = job.text.push(tokens, hidden_last=reason == "stop")
        if released.stopped and reason != "stop":
            self._end(job, "stop")
            return job.final("stop", released)
        if reason is None:
            return job.event(released)
        rest = job.text.finish()
        if rest.stopped:
            reason = "stop"
        return job.final(
            reason,
            Released(released.token_ids + rest.token_ids, released.text + rest.text, True),
        )

    def _end(self, job: Job, reason: FinishReason) -> None:
        assert job.sequence is not None
        job.sequence.finish_reason = reason
        slot = job.sequence.slot
        if self._running.get(slot) is job:  # a request that ended by length has left it already
            del self._running[slot]

    def _fail(self, job: Job, error: Exception | None = None) -> None:
        """Ends a request by an error of its own, or by one of all."""
        if error is not None:
            _LOG.error("request %d ends by an error: %r", job.request_id, error, exc_info=error)
        if job.sequence is None:
            self._waiting.remove(job)
        else:
            self._end(job, "error")
        self._cut_off.append((job, "error"))

    def _break(self, why: str) -> None:
        self.broken = f"{why}; open the model again"
        _LOG.error(self.broken)

    def _refuse_broken(self) -> None:
        if self.broken is not None:
            raise DeviceError(self.broken)


def _plan(drafted: Drafted | None, slot: int) -> Plan:
    if drafted is None:
        return Plan()
    return Plan(
        proposed=int(drafted.lengths[slot]),
        source=drafted.sources.get(slot),
        look=drafted.looks.get(slot),
    )
