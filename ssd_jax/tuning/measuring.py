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
    no_promotion,
    record_request,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tuning.engine_rounds import EngineRounds
from ssd_jax.tuning.throughput import Costs, contention

Clock = Callable[[], float]
Runs = dict[tuple[str, int], Callable[[], float]]
"""Each runs a part of a round and returns its seconds; by kind and size."""

PATIENCE = 60.0
"""Most seconds that a draft elsewhere may take for anything."""

_MIN_TURNS, _MAX_TURNS = 3, 12  # turns of each part
_CONFIRMING_FACTOR = 1.05  # a second time within this factor of the shortest confirms it
_MAX_SECONDS = 4.0  # seconds after which no more turns begin
_AHEAD_ROUNDS = 8  # rounds of mode ar; each is dispatched before the last is read
_MAX_PREFIX = 32  # most tokens before what is measured
_PAUSE = 0.01  # seconds between attempts
_JUST_IN_TIME = 2  # tokens
_TOKEN = 1
_GREEDY = SamplingParams()


def measure(loaded: Loaded, context: int, *, clock: Clock = time.perf_counter) -> Costs:
    """Measures each role alone, then both at once, with the most work that a round may have.

    Raises:
      SsdError: a draft worker does not answer.
    """
    config, role_sets = loaded.config, [loaded.roles("ar", 0)]
    verify = _verify_blank(loaded, role_sets[0].target)
    runs = _target_runs(loaded, role_sets[0].target, verify, clock)
    if config.mode != "ssd":
        role_sets.append(loaded.roles("sd", config.speculated))
        runs |= _round_runs(loaded, role_sets[1], clock)
    if config.prepared == "ssd":
        runs |= _branch_runs(loaded, context, verify, clock)
    seconds = shortest_seconds(runs, clock)
    if config.prepared == "ssd" and loaded.worker is not None:
        loaded.worker.end_last()
    for roles in role_sets:
        roles.close()
    return _costs(seconds)


def measure_target(loaded: Loaded, *, clock: Clock = time.perf_counter) -> Costs:
    """The costs that need no draft."""
    roles = loaded.roles("ar", 0)
    verify = _verify_blank(loaded, roles.target)
    seconds = shortest_seconds(_target_runs(loaded, roles.target, verify, clock), clock)
    roles.close()
    return _costs(seconds)


def shortest_seconds(runs: Runs, clock: Clock) -> dict[tuple[str, int], float]:
    """The fewest seconds of each part.

    The parts take turns until another turn of each has confirmed its shortest time, or until that
    has taken long.
    """
    seconds_by_name: dict[tuple[str, int], list[float]] = {name: [] for name in runs}
    start = clock()
    for turn in range(_MAX_TURNS):
        is_late = clock() - start > _MAX_SECONDS
        if turn >= _MIN_TURNS and (is_late or all(map(_is_confirmed, seconds_by_name.values()))):
            break
        for name, run in runs.items():
            seconds_by_name[name].append(run())
    return {name: min(seconds) for name, seconds in seconds_by_name.items()}


def _is_confirmed(seconds: Sequence[float]) -> bool:
    shortest, second = sorted(seconds)[:2]
    return second <= _CONFIRMING_FACTOR * shortest


def seconds_of(run: Callable[[], Any], clock: Clock) -> float:
    """Seconds of a run behind one that is not timed.

    That one wakes threads, fills caches and waits for what others have left on the device.
    """
    run()
    start = clock()
    run()
    return clock() - start


def _verify_blank(loaded: Loaded, target: Target) -> Callable[[int], None]:
    programs = loaded.programs
    return verify_run(target, blank_proposals(programs, target.slots, programs.widths))


def _target_runs(
    loaded: Loaded, target: Target, verify: Callable[[int], None], clock: Clock
) -> Runs:
    runs: Runs = {("ahead", 0): partial(ahead_run(target, clock), _AHEAD_ROUNDS)}
    for width in loaded.programs.widths:
        runs["verify", width] = partial(seconds_of, partial(verify, width), clock)
    return runs


def rounds_of(loaded: Loaded, roles: Roles, clock: Clock) -> EngineRounds:
    """Rounds of mode sd in all slots, behind a short prompt."""
    assert roles.drafter is not None
    prompt = [_TOKEN] * max(1, min(_MAX_PREFIX, loaded.resolved.context // 2))
    return EngineRounds(roles.target, roles.drafter, prompt, pages=loaded.new_stock(), clock=clock)


def _round_runs(loaded: Loaded, roles: Roles, clock: Clock) -> Runs:
    """Rounds of mode sd with each K that the others are worked out from, as far as there is room
    for them, and T_1."""
    engine = rounds_of(loaded, roles, clock)

    def round_of(k: int) -> float:
        engine.begin(k)
        return engine.run()

    def draft_seconds(k: int) -> float:
        engine.begin(k, 1)
        return engine.draft() / k

    assert roles.drafter is not None
    max_k = roles.drafter.k
    ks = [k for k in sorted({1, max_k, *loaded.programs.widths}) if 0 < k <= max_k]
    runs: Runs = {("round", k): partial(round_of, k) for k in ks if engine.begin(k)}
    if loaded.config.draft_model and runs:
        k = max(k for _, k in runs)
        runs["draft", k] = partial(draft_seconds, k)
    return runs


def _branch_runs(loaded: Loaded, context: int, verify: Callable[[int], None], clock: Clock) -> Runs:
    """Forwards of the branches, a draft just in time, and a verification beside branches."""
    draft, stock = loaded.branching(patience=PATIENCE), loaded.new_stock()
    pages = () if stock is None else range(stock.needed(_MAX_PREFIX))
    branches = Branches(draft, context, pages=pages, clock=clock)
    budgets, widest = loaded.resolved.budgets, max(loaded.programs.widths)
    runs: Runs = {("branches", m): partial(branches.expansion, m) for m in budgets}
    runs["backup", 0] = branches.just_in_time
    verify_widest = partial(verify, widest)
    runs["overlapped", draft.k] = partial(branches.expansion, max(budgets), verify_widest)
    return runs


def _costs(seconds_of_runs: Mapping[tuple[str, int], float]) -> Costs:
    """The costs that these seconds of parts, by kind and size, tell."""

    def by_size(kind: str) -> dict[int, float]:
        return {
            size: seconds
            for (run_kind, size), seconds in sorted(seconds_of_runs.items())
            if run_kind == kind
        }

    costs = Costs(
        verify=by_size("verify"), ahead=seconds_of_runs["ahead", 0], rounds=by_size("round")
    )
    for draft_seconds in by_size("draft").values():
        costs = replace(costs, draft=draft_seconds)
    for k, overlapped in by_size("overlapped").items():
        branches = by_size("branches")
        separate = costs.verify[max(costs.verify)], branches[max(branches)]
        costs = replace(
            costs,
            backup=seconds_of_runs["backup", 0],
            step={m: seconds / k for m, seconds in branches.items()},
            contention=contention(*separate, overlapped),
        )
    return costs


def draft_run(
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
    """Proposals of w tokens in every slot, by w, for `verify_run`; with trees, whole ones."""
    verification, model = programs.verification, programs.model
    blank = programs.blank_tree() if verification.nodes else verification.blank(slots)
    # Other processes must be sent host arrays.
    transfer = model.place if not spans_processes(model.mesh) else lambda proposal: proposal
    lengths = {width: np.full(slots, verification.nodes or width, np.int32) for width in widths}
    return {width: transfer(blank._replace(length=length)) for width, length in lengths.items()}


def verify_run(
    target: Target,
    proposals: Mapping[int, Any],
    params: SamplingParams = _GREEDY,
    *,
    trees: bool = False,
) -> Callable[[int], None]:
    """A function that verifies w tokens of every slot, from dispatch until the outcome is read.

    Args:
      target: with empty slots.
      proposals: by w.
      trees: whether they are trees, whose nodes then all follow the pending token.
    """
    _open(target, range(target.slots), params)
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full_like(tokens, _position(target.context, max(proposals)))

    def run(width: int) -> None:
        proposal = proposals[width] if width else None
        drafted = proposal and Drafted(
            np.full_like(tokens, width),
            proposal.tokens,
            parents=np.zeros(proposal.tokens.shape, np.int32) if trees else None,
        )
        target.accept(target.forward(tokens, lengths, drafted), proposal).read()

    return run


def ahead_run(target: Target, clock: Clock) -> Callable[[int], float]:
    """A function that runs so many rounds of mode ar in all slots; it returns the seconds of one.

    Each round is dispatched before the last is read. The time begins with an idle target, before
    the first dispatch: a delay of the host can then only add to it.
    """
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full_like(tokens, _position(target.context, 0))

    def dispatch(pending: Any) -> Pending:
        return target.accept(target.forward(pending, lengths))

    def run(count: int) -> float:
        dispatch(tokens).read()
        start = clock()
        current = dispatch(tokens)
        for _ in range(count):
            following = dispatch(current.bonus)
            current.read()
            current = following
        seconds = clock() - start
        current.read()
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
        self._begin = no_promotion(draft.slots, draft.k)
        self._begin.position[:], self._begin.pending[:] = position, _TOKEN

    def just_in_time(self) -> float:
        """Seconds to draft a token just in time, until the proposal is ready."""
        num_tokens = min(self._draft.k, _JUST_IN_TIME)

        def draft() -> bool:
            drafts = np.full(self._draft.slots, num_tokens, np.int32)
            answer = self._draft.record(RecordRequest(self._begin, drafts, self._lowered))
            lengths = answer.lengths()
            jax.block_until_ready(answer.proposal())
            return bool(lengths.all())

        return self._seconds(draft) / num_tokens

    def expansion(self, budget: int, concurrent: Callable[[], Any] = lambda: None) -> float:
        """Seconds of K forwards of M branches.

        Args:
          budget: M.
          concurrent: runs once they have begun; the clock stops when both have ended.
        """
        k, slots = self._draft.k, self._draft.slots
        counts, follow = np.zeros((slots, k + 1), np.int32), np.zeros(slots, bool)
        counts[:, 0] = budget

        def expand() -> bool:
            self._draft.record(record_request(self._begin))
            answer = self._draft.expand(ExpansionRequest(counts, follow, self._lowered, k))
            concurrent()
            deadline = self._clock() + PATIENCE
            while not isinstance(branches := answer.branches(k), str):
                if branches is not None and branches.forwards >= k:
                    return True
                if self._clock() > deadline:
                    break
            return False

        return self._seconds(expand)

    def _seconds(self, attempt: Callable[[], bool]) -> float:
        """Seconds of an attempt; if a worker is late, as it may be at first, of all attempts."""

        def answer() -> None:
            deadline = self._clock() + PATIENCE
            while not attempt():
                if self._clock() > deadline:
                    raise SsdError(
                        f"the draft worker did not answer for {PATIENCE:.0f} s while its speed was "
                        "measured: see whether it has a core of its own, and is not one of more "
                        "workers than there are; with mode, k and budget given, nothing is measured"
                    )
                time.sleep(_PAUSE)

        return seconds_of(answer, self._clock)


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
    return max(0, min(_MAX_PREFIX, context - behind - 2))
