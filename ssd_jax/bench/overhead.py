"""`--suite=overhead`: what the engine adds to a decode step on the host."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from rich.table import Table

from ssd_jax.bench.report import SCHEMA_VERSION, json_safe
from ssd_jax.bench.stats import Estimate, median_interval
from ssd_jax.bench.table import Column, build_table


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
    results: dict[str, list[float]] = {"engine": [], "bare": []}
    kinds = {"engine": engine_step, "bare": bare_step}
    for block in range(blocks):
        for name in ("engine", "bare") if block % 2 == 0 else ("bare", "engine"):
            times = []
            for _ in range(steps):
                start = clock()
                kinds[name]()
                times.append(1e3 * (clock() - start))
            results[name].append(float(np.median(times)))
    added = [e - b for e, b in zip(results["engine"], results["bare"], strict=True)]
    engine, bare, difference = (
        median_interval(values) for values in (results["engine"], results["bare"], added)
    )
    assert engine is not None
    assert bare is not None
    assert difference is not None
    return OverheadResult(engine=engine, bare=bare, added=difference, steps=steps)


def overhead_table(result: OverheadResult) -> Table:
    """Three lines: engine, bare, added."""
    rows = [
        ("engine step", result.engine),
        ("bare programs", result.bare),
        ("added by the engine", result.added),
    ]
    columns: tuple[Column[tuple[str, Estimate]], ...] = (
        Column(title="decode step", cell=lambda row: row[0], justify="left"),
        Column(title="ms", cell=lambda row: f"{row[1].median:.3f}"),
        Column(title="of the step", cell=lambda row: f"{row[1].median / result.bare.median:.1%}"),
        Column(title="95% interval", cell=_interval),
    )
    return build_table(columns, rows, title=f"host overhead, blocks of {result.steps} steps")


def overhead_json(
    result: OverheadResult, *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result as an object for `json.dumps`; see `report.bench_json`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "suite": "overhead",
        **environment,
        "settings": dict(settings),
        **dataclasses.asdict(result),
    }
    return json_safe(document)


def _interval(row: tuple[str, Estimate]) -> str | None:
    low, high = row[1].low, row[1].high
    return None if low is None or high is None else f"{low:.3f} to {high:.3f}"
