"""Measures the cost of each part of a round, on roles that are not in use yet: each role with the
other idle, and then a verification with branches beside it.

The parts take turns, so that whatever disturbs the machine for a while hits all of them alike; as
it only adds to their times, the shortest one counts.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from ssd_jax.loading.loaded import Loaded, Roles
from ssd_jax.roles.protocols import Target
from ssd_jax.tuning.engine_rounds import EngineRounds
from ssd_jax.tuning.role_runs import (
    MAX_PREFIX,
    PATIENCE,
    Branches,
    Clock,
    ahead_run,
    seconds_of,
    varied_proposals,
    varied_tokens,
    verify_run,
)
from ssd_jax.tuning.throughput import Costs, contention

Runs = dict[tuple[str, int], Callable[[], float]]
"""Each runs a part of a round and returns its seconds; by kind and size."""
RunsOf = Callable[[int], Runs]
"""The runs with so many slots."""

_MIN_TURNS, _MAX_TURNS = 3, 12  # turns of each part
_CONFIRMING_FACTOR = 1.05  # a second time within this factor of the shortest confirms it
_MAX_SECONDS = 4.0  # seconds after which no more turns begin
_AHEAD_ROUNDS = 8  # rounds of mode ar; each is dispatched before the last is read


def measure(loaded: Loaded, context: int, *, clock: Clock = time.perf_counter) -> Costs:
    """Measures each role alone, then both at once, with the most work that a round may have: with
    all slots, and with those of each batch size whose programs are there.

    Raises:
      SsdError: a draft worker does not answer.
    """
    with _sizes_to_measure(loaded) as sizes:
        times = _Times(sizes, clock)
        roles = loaded.roles("ar", 0)
        verify = _verify_varied(loaded, roles.target)
        of_target = _target_runs(loaded, roles.target, verify, clock)
        if loaded.config.mode == "ssd":
            times.take(of_target)
        else:
            with _rounds_to_measure(loaded, clock) as of_rounds:
                times.take(lambda rows: of_target(rows) | of_rounds(rows))
        if loaded.config.prepared == "ssd":
            with _branches_to_measure(loaded, context, verify, clock) as of_branches:
                times.take(of_branches)
        roles.close()
        return times.costs(loaded.programs.model.data_shards)


def measure_target(loaded: Loaded, *, clock: Clock = time.perf_counter) -> Costs:
    """The costs that need no draft, of all slots."""
    roles = loaded.roles("ar", 0)
    verify = _verify_varied(loaded, roles.target)
    runs = _target_runs(loaded, roles.target, verify, clock)(roles.target.slots)
    seconds = shortest_seconds(runs, clock)
    roles.close()
    return _costs(seconds)


class _Times:
    """The fewest seconds of each part, by number of slots.

    Args:
      sizes: numbers of slots, the first is all.
    """

    def __init__(self, sizes: Sequence[int], clock: Clock) -> None:
        self._seconds: dict[int, dict[tuple[str, int], float]] = {rows: {} for rows in sizes}
        self._clock = clock

    def take(self, runs_of: RunsOf) -> None:
        """Times parts with each number of slots."""
        for rows, seconds in self._seconds.items():
            for name, least in shortest_seconds(runs_of(rows), self._clock).items():
                seconds[name] = min(least, seconds.get(name, math.inf))

    def costs(self, groups: int) -> Costs:
        """What they tell; `groups` of devices run so many slots each."""
        all_slots, *few = map(_costs, self._seconds.values())
        sizes = [*self._seconds][1:]
        return replace(
            all_slots, few={groups * rows: costs for rows, costs in zip(sizes, few, strict=True)}
        )


@contextmanager
def _sizes_to_measure(loaded: Loaded) -> Iterator[list[int]]:
    """Numbers of slots of a group of devices: all, and those of batch sizes that are compiled.

    None is on trial meanwhile: a trial is of texts of users.
    """
    programs, sizes = loaded.programs, loaded.programs.batch_sizes
    smaller = [
        size
        for size in sizes.sizes[:-1]
        if all(sizes.ready(size, width) for width in programs.widths)
    ]
    trials, sizes.trials = sizes.trials, 0
    try:
        yield [programs.slots, *smaller]
    finally:
        sizes.trials = trials


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


def _verify_varied(loaded: Loaded, target: Target) -> Callable[..., None]:
    programs = loaded.programs
    proposals = varied_proposals(programs, target.slots, programs.widths)
    return verify_run(target, proposals, ids=programs.ids)


def _target_runs(
    loaded: Loaded, target: Target, verify: Callable[..., None], clock: Clock
) -> RunsOf:
    ahead = ahead_run(target, clock, ids=loaded.programs.ids)

    def runs_of(rows: int) -> Runs:
        runs: Runs = {("ahead", 0): partial(ahead, _AHEAD_ROUNDS, rows)}
        for width in loaded.programs.widths:
            runs["verify", width] = partial(seconds_of, partial(verify, width, rows), clock)
        return runs

    return runs_of


def rounds_of(loaded: Loaded, roles: Roles, clock: Clock) -> EngineRounds:
    """Rounds of mode sd in all slots, behind short prompts."""
    assert roles.drafter is not None
    length = max(1, min(MAX_PREFIX, loaded.resolved.context // 2))
    prompts = varied_tokens(loaded.programs.ids, roles.target.slots, length).tolist()
    return EngineRounds(roles.target, roles.drafter, prompts, pages=loaded.new_stock(), clock=clock)


@contextmanager
def _rounds_to_measure(loaded: Loaded, clock: Clock) -> Iterator[RunsOf]:
    """Rounds of mode sd with each K that the others are worked out from, as far as there is room
    for them, and T_1; the draft is where rounds will have it."""
    config = loaded.config
    roles = loaded.roles(config.prepared, config.speculated, patience=PATIENCE)
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

    def runs_of(rows: int) -> Runs:
        engine.rows = rows
        runs: Runs = {("round", k): partial(round_of, k) for k in ks if engine.begin(k)}
        if config.draft_model and runs:
            k = max(k for _, k in runs)
            runs["draft", k] = partial(draft_seconds, k)
        return runs

    yield runs_of
    roles.close()
    if config.prepared == "ssd" and loaded.worker is not None:
        loaded.worker.end_last()


@contextmanager
def _branches_to_measure(
    loaded: Loaded, context: int, verify: Callable[..., None], clock: Clock
) -> Iterator[RunsOf]:
    """Forwards of the branches, a draft just in time, and a verification without and with them."""
    draft, stock = loaded.drafts.branching(patience=PATIENCE), loaded.new_stock()
    pages = () if stock is None else range(stock.needed(MAX_PREFIX))
    branches = Branches(draft, context, ids=loaded.programs.ids, pages=pages, clock=clock)
    budgets, widest = loaded.resolved.budgets, max(loaded.programs.widths)

    def runs_of(rows: int) -> Runs:
        branches.rows, verify_widest = rows, partial(verify, widest, rows)
        runs: Runs = {("branches", m): partial(branches.expansion, m) for m in budgets}
        runs["backup", 0] = branches.just_in_time
        runs["verify", widest] = partial(seconds_of, verify_widest, clock)
        runs["overlapped", draft.k] = partial(branches.expansion, max(budgets), verify_widest)
        return runs

    yield runs_of
    if loaded.worker is not None:
        loaded.worker.end_last()


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
