"""An engine over scripted roles that speculates during verification, and is watched."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from ssd_jax.engine.engine import Engine
from ssd_jax.engine.slots.page_stock import PageStock
from ssd_jax.roles.activity import Activity
from ssd_jax.roles.records import DraftBatch, Drafted
from ssd_jax.speculation.backup import BackupKind
from ssd_jax.speculation.controller import Controller, Policies
from ssd_jax.speculation.fan_out import FanOut
from ssd_jax.speculation.fan_out_flag import parse
from ssd_jax.speculation.pace import Pace
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan, Tuner
from ssd_jax.speculation.waiting import Waiting
from ssd_jax.testing.by_row import DraftRow, rows_of
from ssd_jax.testing.fakes import Clock, FakeTarget, Letters
from tests.fakes.branching import FakeBranchingDraft, Script

EOS = 1
TOKENS = 128


class Watched(Controller):
    """A controller that notes what it was told and said, and fails where they do not agree."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.rounds: list[tuple[dict[int, DraftRow], Drafted]] = []

    def propose(self, batch: DraftBatch) -> Drafted:
        drafted, rows = super().propose(batch), rows_of(batch)
        limits = {row.slot: row.limit for row in rows}
        for slot, length in enumerate(drafted.lengths):
            assert length <= limits.get(slot, 0)
            assert (drafted.tokens[slot, :length] >= 0).all()
        assert set(drafted.sources) <= set(limits)
        self.rounds.append(({row.slot: row for row in rows}, drafted))
        return drafted

    def sources(self, slot: int = 0) -> list[str]:
        """What the look-ups of a slot found."""
        return [drafted.sources[slot] for rows, drafted in self.rounds if slot in rows]

    def lengths(self, slot: int = 0) -> list[int]:
        """L of a slot's proposals."""
        return [int(drafted.lengths[slot]) for rows, drafted in self.rounds if slot in rows]


class Parts(NamedTuple):
    """The engine and what it is made of."""

    target: FakeTarget
    draft: FakeBranchingDraft
    controller: Watched
    engine: Engine


def ssd(
    script: Script,
    *,
    k: int = 3,
    draft_k: int | None = None,
    budget: int = 8,
    fan_out: FanOut | str = "uniform",
    backup: BackupKind = "none",
    longer: bool = False,
    remote: bool = False,
    rule: str = "ratio",
    tuner: Tuner | None = None,
    pace: Pace | None = None,
    asks_first: bool | None = None,
    activity: Callable[[], Activity] | None = None,
    clock: Callable[[], float] = time.perf_counter,
    slots: int = 2,
    context: int = 64,
    pages: PageStock | None = None,
    target: Callable[..., FakeTarget] = FakeTarget,
    draft: Callable[..., FakeBranchingDraft] = FakeBranchingDraft,
    **scripted: Any,
) -> Parts:
    """An engine with a controller.

    Args:
      remote: the draft is asked before the target is, and has devices of its own.
      pages: that slots share; those that grow may run out.
      draft: makes the draft, of `scripted` among others.
    """
    verifying = target(script, slots=slots, context=context)
    settings = {"slots": slots, "k": draft_k or k, "branches": budget, "budget": budget} | scripted
    branching = draft(script, **settings)
    controller = Watched(
        branching,
        Policies(
            k=k,
            tuner=tuner or FixedTuner(SpeculationPlan(k=k, budget=budget, longer=longer)),
            fan_out=lambda: parse(fan_out, k, budget) if isinstance(fan_out, str) else fan_out,
            backup=backup,
            tokens=TOKENS,
            rule=rule,
        ),
        elsewhere=remote,
        asks_first=remote if asks_first is None else asks_first,
        put_off=pages is not None and pages.grows,
        waiting=Waiting(activity, pace=pace, clock=clock),
    )
    engine = Engine(verifying, Letters, frozenset({EOS}), drafter=controller, clock=Clock(),
                    pages=pages)  # fmt: skip
    return Parts(verifying, branching, controller, engine)
