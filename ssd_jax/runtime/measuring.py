"""Measures what the parts of a round cost, on roles that nobody uses yet.

The roles are measured one after the other, each with all it may use and the other one idle: what
they take from each other while both are busy shows only in decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import BranchingDraft, Drafted, Drafter, DraftRow, Moved, Target

Clock = Callable[[], float]

PATIENCE = 60.0
"""Seconds that a draft elsewhere may take for anything."""

_FIRST, _TIMED = 1, 3  # runs of each that are not timed, and that are
_TEXT = 32  # most tokens that precede what is measured
_PAUSE = 0.01  # seconds between attempts
_JUST_IN_TIME = 2  # tokens
_TOKEN = 1


def measure_target(
    target: Target,
    proposals: Mapping[int, Any],
    *,
    clock: Clock = time.perf_counter,
) -> dict[int, float]:
    """Seconds of a verification, by its width, from dispatch until its outcome is read.

    Args:
      target: with empty slots.
      proposals: by width w, w tokens for every slot.
      clock: seconds.
    """
    for slot in range(target.slots):
        target.open(slot, SamplingParams(), slot, [], 0)
    position = _position(target.context, max(proposals))
    tokens = np.full(target.slots, _TOKEN, np.int32)
    lengths = np.full(target.slots, position, np.int32)
    found = {}
    for width, proposal in sorted(proposals.items()):
        drafted = Drafted(np.full(target.slots, width, np.int32), proposal) if width else None

        def verify(drafted: Drafted | None = drafted) -> None:
            target.forward(tokens, lengths, drafted).read()

        found[width] = _median(verify, clock)
    return found


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
    for slot in range(slots):
        drafter.open(slot, SamplingParams(), slot, [], 0)
        drafter.prefill(slot, [_TOKEN] * position, 0, last=True)
    rows = [DraftRow(slot, position, [_TOKEN], drafter.k) for slot in range(slots)]
    return _median(lambda: wait(drafter.propose(rows)), clock) / drafter.k


def measure_branches(
    draft: BranchingDraft,
    budgets: Sequence[int],
    context: int,
    wait: Callable[[], Any],
    *,
    clock: Clock = time.perf_counter,
) -> tuple[float, dict[int, float]]:
    """Seconds of a token drafted just in time, and of a forward of M branches by M; of all slots.

    What a draft in a worker takes to answer is in them.

    Args:
      draft: with empty slots. One elsewhere is to wait for answers as long as `PATIENCE`: what it
        is measured for is how long they take, and one that is late each time would never be timed.
      budgets: each M.
      context: most positions of a slot.
      wait: returns when the draft's proposals are there.
      clock: seconds.

    Raises:
      InputError: a worker that does not answer.
    """
    position = _position(context, 2 * draft.k)
    lowered = np.ones((draft.slots, draft.k), np.int32)
    follow = np.zeros(draft.slots, bool)
    for slot in range(draft.slots):
        draft.open(slot, SamplingParams(), slot, [], 0)
        draft.prefill(slot, [_TOKEN] * (position + 1), 0)
    moves = [Moved(slot=slot, position=position, pending=_TOKEN) for slot in range(draft.slots)]

    few = min(draft.k, _JUST_IN_TIME)

    def expand(budget: int) -> bool:
        counts = np.zeros((draft.slots, draft.k + 1), np.int32)
        counts[:, 0] = budget
        draft.move(moves)
        draft.expand(counts, follow=follow, lowered=lowered, forwards=draft.k)
        deadline = clock() + PATIENCE
        while not isinstance(news := draft.news(draft.k), str):
            if news.forwards >= draft.k:
                return True
            if clock() > deadline:
                break
        return False

    def just_in_time() -> bool:
        draft.move(moves)
        drafted = draft.draft(np.full(draft.slots, few, np.int32), lowered=lowered)
        wait()
        return bool(drafted.all())

    step = {
        m: _median(lambda m=m: _until(lambda: expand(m), clock), clock) / draft.k
        for m in sorted(budgets)
    }
    return _median(lambda: _until(just_in_time, clock), clock) / few, step


def _until(attempt: Callable[[], bool], clock: Clock) -> None:
    """Tries until a draft has answered in time: a worker may be late the first time."""
    deadline = clock() + PATIENCE
    while not attempt():
        if clock() > deadline:
            raise InputError(
                "the draft worker did not answer while its speed was measured; give mode, k and "
                "budget, so that nothing has to be measured"
            )
        time.sleep(_PAUSE)


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
