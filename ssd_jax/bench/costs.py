"""What a decode step costs by its parts: drafting, verifying, and the engine on the host.

In decoding drafting and verifying are dispatched without waiting; here they are timed one after the
other, so that the ceiling of hiding the draft, 1 + t_draft / t_verify, can be told (paper,
Corollary 9).
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ssd_jax.bench.stats import Estimate, median_interval
from ssd_jax.bench.table import Column, build_table, estimate_cell, interval, number_cell
from ssd_jax.roles.protocols import Drafter, Target
from ssd_jax.roles.records import IDLE, SlotOpening, draft_batch
from ssd_jax.sampling.params import SamplingParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Medians over rounds, in milliseconds.

    Attributes:
      draft_ms: from the request for proposals until they are there.
      verify_ms: from dispatch until the outcome is there.
      gain: what SSD with the same K reached in decoding, over SD.
    """

    draft_ms: Estimate
    verify_ms: Estimate
    gain: Estimate | None = None

    @property
    def ceiling(self) -> float:
        """Speed-up over SD if drafting cost nothing and nothing else changed."""
        return 1 + self.draft_ms.median / self.verify_ms.median


def time_round(
    target: Target,
    drafter: Drafter,
    wait: Callable[[Any], Any],
    params: SamplingParams,
    *,
    rounds: int = 12,
    prompt: int = 40,
    clock: Callable[[], float] = time.perf_counter,
) -> RoundCosts:
    """Times rounds of one request in slot 0; whatever is emitted, one token is kept of each.

    Args:
      target, drafter: roles with empty slots.
      wait: returns when a proposal is there.
      params: how the request is sampled.
      rounds: timed ones; two more come first.
      prompt: tokens of the prompt, or as many as one prefill takes.
      clock: seconds.
    """
    for role in (target, drafter):
        role.open(SlotOpening(0, params))
    prompt = min(prompt, target.max_chunk)
    ids = [1 + index % 97 for index in range(prompt)]
    pending = int(target.prefill_last(0, ids, 0).read().tokens[0, 0])
    drafter.prefill(0, ids, 0, last=True)
    draft, verify = [], []
    for position in range(prompt, prompt + rounds + 2):
        started = clock()
        batch = draft_batch(target.slots, drafter.k + 1)
        batch.pending[0], batch.position[0] = pending, position
        batch.tokens[0, 0], batch.counts[0] = pending, 1
        batch.limit[0], batch.room[0] = drafter.k, 2**30
        drafted = drafter.propose(batch)
        proposal = drafter.proposal()
        wait(proposal)
        drafted_at = clock()
        tokens = np.zeros(target.slots, np.int32)
        lengths = np.full(target.slots, IDLE, np.int32)
        tokens[0], lengths[0] = pending, position
        outcomes = target.accept(target.forward(tokens, lengths, drafted), proposal).read()
        verify.append(1e3 * (clock() - drafted_at))
        draft.append(1e3 * (drafted_at - started))
        pending = int(outcomes.tokens[0, 0])
    return RoundCosts(draft_ms=_estimate(draft[2:]), verify_ms=_estimate(verify[2:]))


def costs_json(costs: Mapping[str, RoundCosts]) -> dict[str, Any]:
    """For `json.dumps`: by variant."""
    return {
        name: dataclasses.asdict(each) | {"ceiling": each.ceiling} for name, each in costs.items()
    }


def costs_table(costs: Mapping[str, RoundCosts]) -> Table:
    """A line a variant: the parts of a round, and what hiding the draft would reach."""
    columns: list[Column[tuple[str, RoundCosts]]] = [
        Column("variant", lambda row: Text(row[0], style="cyan"), "left"),
        Column("draft ms", lambda row: estimate_cell(row[1].draft_ms, "{:.1f}")),
        Column("verify ms", lambda row: estimate_cell(row[1].verify_ms, "{:.1f}")),
        Column("ceiling", lambda row: number_cell(row[1].ceiling, "{:.2f}x")),
        Column("ssd / sd", lambda row: estimate_cell(row[1].gain, "{:.2f}x")),
    ]
    notes = ["ceiling: 1 + draft / verify, what hiding the draft behind verification would gain"]
    if any(each.gain is not None for each in costs.values()):
        notes.append("ssd / sd: what SSD gained in tokens/s, hits, misses and waits included")
    return build_table(columns, list(costs.items()), title="a round by its parts", notes=notes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class OverheadResult:
    """Milliseconds of one decode step.

    Attributes:
      engine: through `Engine.step`, medians of blocks.
      bare: the same compiled programs called in a loop, their outcome read each time.
      added: engine minus bare, paired by block.
      steps: steps in a block.
    """

    engine: Estimate
    bare: Estimate
    added: Estimate
    steps: int


def time_overhead(
    engine_step: Callable[[], object],
    bare_step: Callable[[], object],
    *,
    blocks: int = 20,
    steps: int = 20,
    clock: Callable[[], float] = time.perf_counter,
) -> OverheadResult:
    """Alternates blocks of both kinds of step (A B, B A, ...); a block counts as its median."""
    kinds = {"engine": engine_step, "bare": bare_step}
    medians: dict[str, list[float]] = {name: [] for name in kinds}
    for block in range(blocks):
        for name in kinds if block % 2 == 0 else reversed(kinds):
            times = []
            for _ in range(steps):
                start = clock()
                kinds[name]()
                times.append(1e3 * (clock() - start))
            medians[name].append(float(np.median(times)))
    engine, bare = medians.values()
    added = [with_it - without for with_it, without in zip(engine, bare, strict=True)]
    found = (_estimate(values) for values in (engine, bare, added))
    return OverheadResult(**dict(zip(("engine", "bare", "added"), found, strict=True)), steps=steps)


def overhead_table(result: OverheadResult) -> Table:
    """Three lines: engine, bare, added."""
    rows = [
        ("engine step", result.engine),
        ("bare programs", result.bare),
        ("added by the engine", result.added),
    ]
    columns: list[Column[tuple[str, Estimate]]] = [
        Column("decode step", lambda row: row[0], "left"),
        Column("ms", lambda row: f"{row[1].median:.3f}"),
        Column("of the step", lambda row: f"{row[1].median / result.bare.median:.1%}"),
        Column("95% interval", lambda row: interval(row[1], "{:.3f}", " to ")),
    ]
    return build_table(columns, rows, title=f"host overhead, blocks of {result.steps} steps")


def _estimate(values: list[float]) -> Estimate:
    estimate = median_interval(values)
    assert estimate is not None  # something was timed
    return estimate
