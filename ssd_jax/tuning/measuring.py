"""Measures the cost of each part of a round, on roles that are not in use yet: each role with the
other idle, and then a verification with branches beside it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import numpy as np

from ssd_jax.devices.target_programs import Programs
from ssd_jax.errors import SsdError
from ssd_jax.loaded import Loaded
from ssd_jax.models.sharding import spans_processes
from ssd_jax.roles.protocols import BranchingDraft, Drafter, Pending, Target
from ssd_jax.roles.records import Drafted, SlotOpening, draft_batch, promotion
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tuning.throughput import Costs, contention

Clock = Callable[[], float]

PATIENCE = 60.0
"""Most seconds that a draft elsewhere may take for anything."""

_FIRST, _TIMED = 1, 3  # runs of each that are not timed, and that are timed
_AGAIN, _ODD = 2, 1.2  # most repetitions of what takes this many times as long as a larger one
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
    config, programs = loaded.config, loaded.programs
    proposals = blank_proposals(programs, config.slots, programs.widths)
    roles = loaded.roles("ar", 0)
    verify = verifying(roles.target, proposals)
    verified = by_size(programs.widths, lambda width: median(partial(verify, width), clock))
    costs = Costs(verify=verified, ahead=median(looking_ahead(roles.target), clock))
    if config.draft_model and config.mode != "ssd":
        costs = replace(costs, draft=measure_draft(loaded, context, clock=clock))
    if config.prepared == "ssd":
        draft, stock = loaded.branching(patience=PATIENCE), loaded.new_stock()
        pages = () if stock is None else range(stock.needed(_TEXT))
        branches = Branches(draft, context, pages=pages, clock=clock)
        forwards = by_size(config.budgets, branches.expansion)
        width, budget = max(programs.widths), max(config.budgets)
        together = branches.expansion(budget, partial(verify, width))
        costs = replace(
            costs,
            backup=branches.just_in_time(),
            step={m: seconds / draft.k for m, seconds in forwards.items()},
            contention=contention(verified[width], forwards[budget], together),
        )
        if loaded.worker is not None:
            loaded.worker.end_last()
    roles.close()
    return costs


def measure_draft(loaded: Loaded, context: int, *, clock: Clock = time.perf_counter) -> float:
    """Measures T_1 of mode sd, for all slots."""
    roles = loaded.roles("sd", loaded.config.speculated)
    drafter = roles.drafter
    assert drafter is not None
    found = median(drafting(drafter, loaded.config.slots, context), clock) / drafter.k
    roles.close()
    return found


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


def looking_ahead(target: Target) -> Callable[[], None]:
    """A function that dispatches a round of mode ar in all slots, then reads the one before."""
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full_like(tokens, _position(target.context, 0))

    def dispatched(pending: Any) -> Pending:
        return target.accept(target.forward(pending, lengths))

    before = dispatched(tokens)

    def run() -> None:
        nonlocal before
        last, before = before, dispatched(before.bonus)
        last.read()

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
        self._begun = promotion(draft.slots, draft.k)
        self._begun.position[:], self._begun.pending[:] = position, _TOKEN

    def just_in_time(self) -> float:
        """Seconds to draft a token just in time, until the proposal is ready."""
        few = min(self._draft.k, _JUST_IN_TIME)

        def drafted() -> bool:
            self._draft.promote(self._begun)
            limits = np.full(self._draft.slots, few, np.int32)
            lengths = self._draft.draft(limits, lowered=self._lowered)()
            jax.block_until_ready(self._draft.proposal())
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
            self._draft.promote(self._begun)
            self._draft.expand(counts, follow=follow, lowered=self._lowered, forwards=k)
            beside()
            deadline = self._clock() + PATIENCE
            while not isinstance(made := self._draft.branch_tokens(k), str):
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

        return median(answered, self._clock)


def by_size(sizes: Iterable[int], measured: Callable[[int], float]) -> dict[int, float]:
    """Seconds by size, ascending.

    What takes longer than a larger one does is measured again, since something may have disturbed
    it; its shortest time counts.
    """
    found = {size: measured(size) for size in sorted(sizes)}
    for size, larger in reversed([*pairwise(found)]):
        for _ in range(_AGAIN):
            if found[size] > _ODD * found[larger]:
                found[size] = min(found[size], measured(size))
    return found


def median(run: Callable[[], Any], clock: Clock) -> float:
    """Seconds that `run` takes once it is warm."""
    seconds = []
    for _ in range(_FIRST + _TIMED):
        began = clock()
        run()
        seconds.append(clock() - began)
    return float(np.median(seconds[_FIRST:]))


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
