"""Measures what the parts of a round cost, on roles that nobody uses yet: each role with the other
one idle, and then a verification with branches beside it."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import jax
import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import BranchingDraft, Drafted, Drafter, DraftRow, Moved, Target
from ssd_jax.tuning.throughput import Costs, contention

if TYPE_CHECKING:
    from ssd_jax.loaded import Loaded

Clock = Callable[[], float]

PATIENCE = 60.0
"""Seconds that a draft elsewhere may take for anything."""

_FIRST, _TIMED = 1, 3  # runs of each that are not timed, and that are
_TEXT = 32  # most tokens that precede what is measured
_PAUSE = 0.01  # seconds between attempts
_JUST_IN_TIME = 2  # tokens
_TOKEN = 1


def measure(loaded: Loaded, context: int) -> Costs:
    """Each role alone, then both at once, with as much work as a round may have.

    Raises:
      InputError: a draft worker that does not answer.
    """
    config, programs = loaded.config, loaded.programs
    slots = config.slots
    blank = programs.verification.blank(slots)
    proposals: dict[int, Any] = {
        width: programs.model.place(blank._replace(length=np.full(slots, width, np.int32)))
        for width in programs.widths
    }
    verifications = Verifications(loaded.roles("ar", 0).target, proposals)
    costs = Costs(verify=verifications.seconds())
    if config.draft_model and config.mode != "ssd":
        costs = dataclasses.replace(costs, draft=measure_draft(loaded, context))
    if config.prepared == "ssd":
        draft = loaded.branching(patience=PATIENCE)
        branches = Branches(draft, context)
        forwards = {m: branches.expansion(m) for m in sorted(config.budgets)}
        width, budget = max(programs.widths), max(config.budgets)
        together = branches.expansion(budget, lambda: verifications.run(width))
        costs = dataclasses.replace(
            costs,
            backup=branches.just_in_time(lambda: jax.block_until_ready(draft.proposal())),
            step={m: seconds / draft.k for m, seconds in forwards.items()},
            contention=contention(costs.verify[width], forwards[budget], together),
        )
        if loaded.worker is not None:
            loaded.worker.drafts.pop().close()
    return costs


def measure_draft(loaded: Loaded, context: int) -> float:
    """T_1 of mode sd."""
    drafter = loaded.roles("sd", loaded.config.speculated).drafter
    assert drafter is not None
    return measure_drafter(
        drafter,
        loaded.config.slots,
        context,
        lambda drafted: jax.block_until_ready(drafted.proposal),
    )


class Verifications:
    """Times verifications, from dispatch until the outcome is read.

    Args:
      target: with empty slots.
      proposals: by width w, w tokens for every slot.
      clock: seconds.
    """

    def __init__(
        self, target: Target, proposals: Mapping[int, Any], *, clock: Clock = time.perf_counter
    ) -> None:
        self._target, self._proposals, self._clock = target, proposals, clock
        _open(target, target.slots)
        position = _position(target.context, max(proposals))
        self._tokens = np.full(target.slots, _TOKEN, np.int32)
        self._lengths = np.full(target.slots, position, np.int32)

    def run(self, width: int) -> None:
        """Verifies that many tokens of every slot."""
        drafted = None
        if width:
            drafted = Drafted(np.full_like(self._lengths, width), self._proposals[width])
        self._target.forward(self._tokens, self._lengths, drafted).read()

    def seconds(self) -> dict[int, float]:
        """Of a verification, by its width."""
        return {
            width: _median(functools.partial(self.run, width), self._clock)
            for width in sorted(self._proposals)
        }


def measure_drafter(
    drafter: Drafter,
    slots: int,
    context: int,
    wait: Callable[[Drafted], Any],
    *,
    clock: Clock = time.perf_counter,
) -> float:
    """Seconds of a drafted token of all slots.

    Args:
      drafter: with empty slots.
      slots, context: how many, and most positions of each.
      wait: returns when the proposals are there.
      clock: seconds.
    """
    position = _position(context, drafter.k)
    _open(drafter, slots)
    for slot in range(slots):
        drafter.prefill(slot, [_TOKEN] * position, 0, last=True)
    rows = [DraftRow(slot, position, [_TOKEN], drafter.k) for slot in range(slots)]
    return _median(lambda: wait(drafter.propose(rows)), clock) / drafter.k


class Branches:
    """Times the branches of mode ssd on a draft with empty slots.

    What a draft in a worker takes to answer is in all that it tells.

    Args:
      draft: one elsewhere is to wait for answers as long as `PATIENCE`: what it is measured for is
        how long they take, and one that is late each time would never be timed.
      context: most positions of a slot.
      clock: seconds.

    Raises:
      InputError: here as in the methods, a worker that does not answer.
    """

    def __init__(
        self, draft: BranchingDraft, context: int, *, clock: Clock = time.perf_counter
    ) -> None:
        self._draft, self._clock = draft, clock
        self._lowered = np.ones((draft.slots, draft.k), np.int32)
        position = _position(context, 2 * draft.k)
        _open(draft, draft.slots)
        for slot in range(draft.slots):
            draft.prefill(slot, [_TOKEN] * (position + 1), 0)
        self._moves = [
            Moved(slot=slot, position=position, pending=_TOKEN) for slot in range(draft.slots)
        ]

    def just_in_time(self, wait: Callable[[], Any]) -> float:
        """Seconds of a token of all slots that is drafted just in time.

        Args:
          wait: returns when the draft's proposals are there.
        """
        few = min(self._draft.k, _JUST_IN_TIME)
        limits = np.full(self._draft.slots, few, np.int32)

        def drafted() -> bool:
            self._draft.move(self._moves)
            lengths = self._draft.draft(limits, lowered=self._lowered)
            wait()
            return bool(lengths.all())

        return self._seconds(drafted) / few

    def expansion(self, budget: int, beside: Callable[[], Any] = lambda: None) -> float:
        """Seconds of K forwards of M branches of all slots.

        Args:
          budget: M.
          beside: run when they have begun; they and it have ended when the clock stops.
        """
        k, slots = self._draft.k, self._draft.slots
        counts = np.zeros((slots, k + 1), np.int32)
        counts[:, 0] = budget
        follow = np.zeros(slots, bool)

        def expanded() -> bool:
            self._draft.move(self._moves)
            self._draft.expand(counts, follow=follow, lowered=self._lowered, forwards=k)
            beside()
            deadline = self._clock() + PATIENCE
            while not isinstance(news := self._draft.news(k), str):
                if news.forwards >= k:
                    return True
                if self._clock() > deadline:
                    break
            return False

        return self._seconds(expanded)

    def _seconds(self, attempt: Callable[[], bool]) -> float:
        """Of an attempt; tries until the draft has answered in time: a worker may be late first."""

        def until() -> None:
            deadline = self._clock() + PATIENCE
            while not attempt():
                if self._clock() > deadline:
                    raise InputError(
                        "the draft worker did not answer while its speed was measured; give mode, "
                        "k and budget, so that nothing has to be measured"
                    )
                time.sleep(_PAUSE)

        return _median(until, self._clock)


def _open(role: Target | Drafter | BranchingDraft, slots: int) -> None:
    for slot in range(slots):
        role.open(slot, SamplingParams(), slot, [], 0)


def _position(context: int, behind: int) -> int:
    """Where the pending token is, with room behind it."""
    return max(0, min(_TEXT, context - behind - 2))


def _median(run: Callable[[], Any], clock: Clock) -> float:
    seconds = []
    for _ in range(_FIRST + _TIMED):
        began = clock()
        run()
        seconds.append(clock() - began)
    return float(np.median(seconds[_FIRST:]))
