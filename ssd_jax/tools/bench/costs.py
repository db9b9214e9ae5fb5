"""The cost of a decode step by its parts: drafting, verifying, and the engine on the host.

In decoding, drafting and verifying are dispatched without waiting. Here they are timed one after
the other, which gives the ceiling of hiding the draft: 1 + t, where t = t_draft / t_verify (paper,
Corollary 9), or (1 + t) / t where the draft takes longer than what could hide it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

from rich.text import Text

from ssd_jax.tools.bench.stats import Estimate, estimate_of
from ssd_jax.tools.bench.step import in_turns
from ssd_jax.tools.bench.table import (
    Column,
    Page,
    build_table,
    estimate_cell,
    interval,
    number_cell,
)

_WARM_UP, _ROUNDS = 2, 12
"""Rounds of warm-up, and rounds that count."""
_BLOCKS, _STEPS = 20, 20
"""Blocks of decode steps, and steps in one."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundCosts:
    """Medians over rounds, in milliseconds.

    Attributes:
      draft_ms: from the request for proposals until they are ready.
      verify_ms: from dispatch until the outcome is ready.
      gain: measured speed-up of SSD with the same K over SD in decoding.
      ceiling: speed-up over SD if drafting ran beside verification and nothing else changed.
    """

    draft_ms: Estimate
    verify_ms: Estimate
    gain: Estimate | None = None
    ceiling: float


def time_round(draft: Callable[[], object], verify: Callable[[], object]) -> RoundCosts:
    """Times proposals and verifications in turn, see `in_turns`."""
    times = in_turns((draft, verify), rounds=_WARM_UP + _ROUNDS)
    drafting, verifying = (estimate_of(ms[_WARM_UP:]) for ms in times)
    ratio = drafting.value / verifying.value
    ceiling = (1 + ratio) / max(1, ratio)
    return RoundCosts(draft_ms=drafting, verify_ms=verifying, ceiling=ceiling)


def costs_table(costs: Mapping[str, RoundCosts]) -> Page:
    """A line a variant: the parts of a round, and what hiding the draft would reach."""
    columns: list[Column[tuple[str, RoundCosts]]] = [
        Column("variant", lambda row: Text(row[0], style="cyan"), "left"),
        Column("draft ms", lambda row: estimate_cell(row[1].draft_ms, "{:.1f}")),
        Column("verify ms", lambda row: estimate_cell(row[1].verify_ms, "{:.1f}")),
        Column("ceiling", lambda row: number_cell(row[1].ceiling, "{:.2f}x")),
        Column("ssd / sd", lambda row: estimate_cell(row[1].gain, "{:.2f}x")),
    ]
    notes = ["ceiling: (draft + verify) / the longer one, what running them at once would gain"]
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
    """

    engine: Estimate
    bare: Estimate
    added: Estimate
    steps: int


def time_overhead(
    engine_step: Callable[[], object], bare_step: Callable[[], object]
) -> OverheadResult:
    """Alternates blocks of both kinds of step; see `in_turns`."""
    engine, bare = in_turns((engine_step, bare_step), rounds=_BLOCKS, times=_STEPS)
    added = [with_it - without for with_it, without in zip(engine, bare, strict=True)]
    return OverheadResult(
        engine=estimate_of(engine), bare=estimate_of(bare), added=estimate_of(added), steps=_STEPS
    )


def overhead_table(result: OverheadResult) -> Page:
    """Three lines: engine, bare, added."""
    rows = [
        ("engine step", result.engine),
        ("bare programs", result.bare),
        ("added by the engine", result.added),
    ]
    columns: list[Column[tuple[str, Estimate]]] = [
        Column("decode step", lambda row: row[0], "left"),
        Column("ms", lambda row: f"{row[1].value:.3f}"),
        Column("of the step", lambda row: f"{row[1].value / result.bare.value:.1%}"),
        Column("95% interval", lambda row: interval(row[1], "{:.3f}", " to ")),
    ]
    return build_table(columns, rows, title=f"host overhead, blocks of {result.steps} steps")
