"""Measures the cost of each part of a round, on roles that are not in use yet: each role with the
other idle, and then a verification with branches beside it.

The parts take turns, so that whatever disturbs the machine for a while hits all of them alike; as
it only adds to their times, the shortest one counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import numpy as np

from ssd_jax.devices.target_programs import Programs
from ssd_jax.errors import SsdError
from ssd_jax.loading.loaded import Loaded, Roles
from ssd_jax.models.sharding import spans_processes
from ssd_jax.roles.protocols import BranchingDraft, Drafter, Pending, Target
from ssd_jax.roles.records import (
    Drafted,
    ExpansionRequest,
    RecordRequest,
    SlotOpening,
    draft_batch,
    promotion,
    record_request,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tuning.engine_rounds import EngineRounds
from ssd_jax.tuning.throughput import Costs, contention

Clock = Callable[[], float]
Parts = dict[tuple[str, int], Callable[[], float]]
"""Each runs a part of a round and returns its seconds; by kind and size."""

PATIENCE = 60.0
"""Most seconds that a draft elsewhere may take for anything."""

_FEWEST, _MOST = 3, 12  # turns of each part
_CLOSE = 1.05  # a second time within this factor of the shortest confirms it
_LONG = 4.0  # seconds after which no more turns begin
_IN_A_ROW = 8  # rounds of mode ar; each is dispatched before the last is read
_TEXT = 32  # most tokens before what is measured
_PAUSE = 0.01  # seconds between attempts
_JUST_IN_TIME = 2  # tokens
_TOKEN = 1
_GREEDY = SamplingParams()


def measure(loaded: Loaded, context: int, *, clock: Clock = time.perf_counter) -> Costs:
    """Measures each role alone, then both at once, with the most work that a round may have.

    Raises:
      SsdError: a draft worker does not answer.
    """
    config, opened = loaded.config, [loaded.roles("ar", 0)]
    verify = _verifying_each(loaded, opened[0].target)
    parts = _target_parts(loaded, opened[0].target, verify, clock)
    if config.mode != "ssd":
        opened.append(loaded.roles("sd", config.speculated))
        parts |= _round_parts(loaded, opened[1], context, clock)
    if config.prepared == "ssd":
        parts |= _branch_parts(loaded, context, verify, clock)
    found = in_turns(parts, clock)
    if config.prepared == "ssd" and loaded.worker is not None:
        loaded.worker.end_last()
    for each in opened:
        each.close()
    return _costs(found)


def measure_target(loaded: Loaded, *, clock: Clock = time.perf_counter) -> Costs:
    """The costs that need no draft."""
    roles = loaded.roles("ar", 0)
    verify = _verifying_each(loaded, roles.target)
    found = in_turns(_target_parts(loaded, roles.target, verify, clock), clock)
    roles.close()
    return _costs(found)


def measure_draft(loaded: Loaded, context: int, *, clock: Clock = time.perf_counter) -> float:
    """Measures T_1 of mode sd, for all slots."""
    roles = loaded.roles("sd", loaded.config.speculated)
    drafter = roles.drafter
    assert drafter is not None
    run = drafting(drafter, loaded.config.slots, context)
    k = drafter.k
    found = in_turns({("draft", k): partial(timed, run, clock)}, clock)
    roles.close()
    return found["draft", k] / k


def in_turns(parts: Parts, clock: Clock) -> dict[tuple[str, int], float]:
    """The fewest seconds of each part.

    The parts take turns until another turn of each has confirmed its shortest time, or until that
    has taken long.
    """
    found: dict[tuple[str, int], list[float]] = {name: [] for name in parts}
    began = clock()
    for turn in range(_MOST):
        late = clock() - began > _LONG
        if turn >= _FEWEST and (late or all(map(_confirmed, found.values()))):
            break
        for name, part in parts.items():
            found[name].append(part())
    return {name: min(seconds) for name, seconds in found.items()}


def _confirmed(seconds: Sequence[float]) -> bool:
    shortest, second = sorted(seconds)[:2]
    return second <= _CLOSE * shortest


def timed(run: Callable[[], Any], clock: Clock) -> float:
    """Seconds of a run behind one that is not timed.

    That one wakes threads, fills caches and waits for what others have left on the device.
    """
    run()
    began = clock()
    run()
    return clock() - began


def _verifying_each(loaded: Loaded, target: Target) -> Callable[[int], None]:
    programs = loaded.programs
    return verifying(target, blank_proposals(programs, target.slots, programs.widths))


def _target_parts(
    loaded: Loaded, target: Target, verify: Callable[[int], None], clock: Clock
) -> Parts:
    parts: Parts = {("ahead", 0): partial(looking_ahead(target, clock), _IN_A_ROW)}
    for width in loaded.programs.widths:
        parts["verify", width] = partial(timed, partial(verify, width), clock)
    return parts


def _round_parts(loaded: Loaded, roles: Roles, context: int, clock: Clock) -> Parts:
    """Rounds of mode sd with each K that the others are worked out from, as far as there is room
    for them, and T_1."""
    assert roles.drafter is not None
    prompt = [_TOKEN] * max(1, min(_TEXT, context // 2))
    engine = EngineRounds(
        roles.target, roles.drafter, prompt, pages=loaded.new_stock(), clock=clock
    )

    def round_of(k: int) -> float:
        engine.begin(k)
        return engine.run()

    def drafted(k: int) -> float:
        engine.begin(k, 1)
        return engine.draft() / k

    most = roles.drafter.k
    ks = [k for k in sorted({1, most, *loaded.programs.widths}) if 0 < k <= most]
    parts: Parts = {("round", k): partial(round_of, k) for k in ks if engine.begin(k)}
    if loaded.config.draft_model and parts:
        k = max(k for _, k in parts)
        parts["draft", k] = partial(drafted, k)
    return parts


def _branch_parts(
    loaded: Loaded, context: int, verify: Callable[[int], None], clock: Clock
) -> Parts:
    """Forwards of the branches, a draft just in time, and a verification beside branches."""
    draft, stock = loaded.branching(patience=PATIENCE), loaded.new_stock()
    pages = () if stock is None else range(stock.needed(_TEXT))
    branches = Branches(draft, context, pages=pages, clock=clock)
    budgets, widest = loaded.resolved.budgets, max(loaded.programs.widths)
    parts: Parts = {("branches", m): partial(branches.expansion, m) for m in budgets}
    parts["backup", 0] = branches.just_in_time
    beside = partial(verify, widest)
    parts["together", draft.k] = partial(branches.expansion, max(budgets), beside)
    return parts


def _costs(found: Mapping[tuple[str, int], float]) -> Costs:
    """The costs that these seconds of parts, by kind and size, tell."""

    def of(kind: str) -> dict[int, float]:
        return {size: seconds for (each, size), seconds in sorted(found.items()) if each == kind}

    costs = Costs(verify=of("verify"), ahead=found["ahead", 0], rounds=of("round"))
    for drafted in of("draft").values():
        costs = replace(costs, draft=drafted)
    for k, together in of("together").items():
        branches = of("branches")
        alone = costs.verify[max(costs.verify)], branches[max(branches)]
        costs = replace(
            costs,
            backup=found["backup", 0],
            step={m: seconds / k for m, seconds in branches.items()},
            contention=contention(*alone, together),
        )
    return costs


def drafting(
    drafter: Drafter, slots: int, context: int, params: SamplingParams = _GREEDY
) -> Callable[[], None]:
    """A function that proposes K tokens in every slot, and waits; slots are empty before."""
    position = _position(context, drafter.k)
    _open(drafter, range(slots), params)
    for slot in range(slots):
        drafter.prefill(slot, [_TOKEN] * position, 0, last=True)
    batch = draft_batch(slots, drafter.k + 1)
    batch.pending[:], batch.position[:] = _TOKEN, position
    batch.tokens[:, 0], batch.counts[:] = _TOKEN, 1
    batch.limit[:] = batch.room[:] = drafter.k

    def propose() -> None:
        drafter.propose(batch)
        jax.block_until_ready(drafter.proposal())

    return propose


def blank_proposals(programs: Programs, slots: int, widths: Iterable[int]) -> dict[int, Any]:
    """Proposals of w tokens in every slot, by w, for `verifying`."""
    blank, model = programs.verification.blank(slots), programs.model
    # Other processes must be sent host arrays.
    place = model.place if not spans_processes(model.mesh) else lambda proposal: proposal
    return {
        width: place(blank._replace(length=np.full(slots, width, np.int32))) for width in widths
    }


def verifying(
    target: Target, proposals: Mapping[int, Any], params: SamplingParams = _GREEDY
) -> Callable[[int], None]:
    """A function that verifies w tokens of every slot, from dispatch until the outcome is read.

    Args:
      target: with empty slots.
      proposals: by w.
    """
    _open(target, range(target.slots), params)
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full_like(tokens, _position(target.context, max(proposals)))

    def run(width: int) -> None:
        proposal = proposals[width] if width else None
        drafted = proposal and Drafted(np.full_like(tokens, width), proposal.tokens)
        target.accept(target.forward(tokens, lengths, drafted), proposal).read()

    return run


def looking_ahead(target: Target, clock: Clock) -> Callable[[int], float]:
    """A function that runs so many rounds of mode ar in all slots; it returns the seconds of one.

    Each round is dispatched before the last is read. The time begins with an idle target, before
    the first dispatch: a delay of the host can then only add to it.
    """
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full_like(tokens, _position(target.context, 0))

    def dispatched(pending: Any) -> Pending:
        return target.accept(target.forward(pending, lengths))

    def run(count: int) -> float:
        dispatched(tokens).read()
        began = clock()
        last = dispatched(tokens)
        for _ in range(count):
            ahead = dispatched(last.bonus)
            last.read()
            last = ahead
        seconds = clock() - began
        last.read()
        return seconds / count

    return run


class Branches:
    """Times the branches of mode ssd on a draft with empty slots, for all slots together.

    For a draft in a worker, all times include the time to answer.

    Args:
      draft: a draft elsewhere must wait for answers as long as `PATIENCE`: the time of answers is
        what is measured, and a draft that is late each time would never be timed.
      context: most positions of a slot.
      pages: pages of all slots, if they share a stock; their content does not matter.
      clock: seconds.

    Raises:
      SsdError: a worker does not answer; likewise in the methods.
    """

    def __init__(
        self,
        draft: BranchingDraft,
        context: int,
        *,
        pages: Sequence[int] = (),
        clock: Clock = time.perf_counter,
    ) -> None:
        self._draft, self._clock = draft, clock
        self._lowered = np.ones((draft.slots, draft.k), np.int32)
        position, slots = _position(context, 2 * draft.k), range(draft.slots)
        _open(draft, slots, pages=pages)
        for slot in slots:
            draft.prefill(slot, [_TOKEN] * (position + 1), 0)
        self._begin = promotion(draft.slots, draft.k)
        self._begin.position[:], self._begin.pending[:] = position, _TOKEN

    def just_in_time(self) -> float:
        """Seconds to draft a token just in time, until the proposal is ready."""
        few = min(self._draft.k, _JUST_IN_TIME)

        def drafted() -> bool:
            drafts = np.full(self._draft.slots, few, np.int32)
            answer = self._draft.record(RecordRequest(self._begin, drafts, self._lowered))
            lengths = answer.lengths()
            jax.block_until_ready(answer.proposal())
            return bool(lengths.all())

        return self._seconds(drafted) / few

    def expansion(self, budget: int, beside: Callable[[], Any] = lambda: None) -> float:
        """Seconds of K forwards of M branches.

        Args:
          budget: M.
          beside: runs once they have begun; the clock stops when both have ended.
        """
        k, slots = self._draft.k, self._draft.slots
        counts, follow = np.zeros((slots, k + 1), np.int32), np.zeros(slots, bool)
        counts[:, 0] = budget

        def expanded() -> bool:
            self._draft.record(record_request(self._begin))
            answer = self._draft.expand(ExpansionRequest(counts, follow, self._lowered, k))
            beside()
            deadline = self._clock() + PATIENCE
            while not isinstance(made := answer.branches(k), str):
                if made is not None and made.forwards >= k:
                    return True
                if self._clock() > deadline:
                    break
            return False

        return self._seconds(expanded)

    def _seconds(self, attempt: Callable[[], bool]) -> float:
        """Seconds of an attempt; if a worker is late, as it may be at first, of all attempts."""

        def answered() -> None:
            deadline = self._clock() + PATIENCE
            while not attempt():
                if self._clock() > deadline:
                    raise SsdError(
                        f"the draft worker did not answer for {PATIENCE:.0f} s while its speed was "
                        "measured: see whether it has a core of its own, and is not one of more "
                        "workers than there are; with mode, k and budget given, nothing is measured"
                    )
                time.sleep(_PAUSE)

        return timed(answered, self._clock)


def _open(
    role: Target | Drafter | BranchingDraft,
    slots: Iterable[int],
    params: SamplingParams = _GREEDY,
    pages: Sequence[int] = (),
) -> None:
    for slot in slots:
        role.open(SlotOpening(slot, params, slot, pages=tuple(pages)))


def _position(context: int, behind: int) -> int:
    """Position of the pending token, with room behind it."""
    return max(0, min(_TEXT, context - behind - 2))
