"""`--suite=step`: what a forward of 1, 2, 3, ... tokens costs, and how fast weights are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from rich.table import Table

from ssd_jax.bench.bandwidth import Bandwidth
from ssd_jax.bench.stats import Estimate, median_interval, ratio_interval
from ssd_jax.bench.table import Column, build_table, interval, number_cell
from ssd_jax.errors import InputError

WIDTHS = range(1, 18)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """One width: a forward of that many tokens.

    Attributes:
      width: tokens of one forward.
      ms: median over the repeats.
      ratio: against width 1, paired by repeat; None if width 1 was not measured.
      gb_per_s: weight bytes over the median time, in 1e9 bytes per second.
    """

    width: int
    ms: Estimate
    ratio: Estimate | None
    gb_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """All widths, in the order given."""

    weight_bytes: int
    repeats: int
    steps: tuple[StepRow, ...]


def time_steps(
    forward: Callable[[int], Callable[[], None]],
    *,
    weight_bytes: int,
    widths: Sequence[int] = WIDTHS,
    repeats: int = 20,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    progress: Callable[[int, int], None] | None = None,
) -> StepResult:
    """Times forwards of several widths, one of each in turn, so that drift hits all alike.

    Args:
      forward: gives for a width a callable that runs one forward of that many tokens and returns
        when it is done. All are made before the first is timed.
      weight_bytes: bytes of weights that one forward reads.
      widths: tokens of a forward, different from each other.
      repeats: rounds over all widths, every second one from the last width to the first.
      warmup: untimed runs of each width before.
      clock: seconds.
      progress: called with (rounds done, rounds) after each round.

    Raises:
      InputError: no widths, one below 1 or given twice, or repeats below 1.
    """
    if not widths or min(widths) < 1 or len(set(widths)) < len(widths) or repeats < 1:
        raise InputError(
            f"widths = {list(widths)} and repeats = {repeats}: "
            "give different widths of at least 1, and repeats >= 1"
        )
    runs = {width: forward(width) for width in widths}
    for run in runs.values():
        for _ in range(warmup):
            run()
    ms: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats):
        for width in widths if repeat % 2 == 0 else reversed(widths):
            start = clock()
            runs[width]()
            ms[width].append(1e3 * (clock() - start))
        if progress is not None:
            progress(repeat + 1, repeats)
    steps = []
    for width in widths:
        estimate = median_interval(ms[width])
        assert estimate is not None  # repeats >= 1
        steps.append(
            StepRow(
                width=width,
                ms=estimate,
                ratio=ratio_interval(ms[width], ms[1]) if 1 in ms else None,
                gb_per_s=weight_bytes / estimate.median / 1e6,
            )
        )
    return StepResult(steps=tuple(steps), weight_bytes=weight_bytes, repeats=repeats)


def step_table(result: StepResult, memory: Bandwidth) -> Table:
    """The cost of each width, with the machine's bandwidth below."""
    columns: list[Column[StepRow]] = [
        Column("tokens", lambda row: str(row.width)),
        Column("ms", lambda row: f"{row.ms.median:.2f}"),
        Column("95% interval", lambda row: interval(row.ms, "{:.2f}", "-")),
        Column("/ 1 token", lambda row: number_cell(row.ratio and row.ratio.median, "{:.2f}x")),
        Column("weights GB/s", lambda row: f"{row.gb_per_s:.1f}"),
        Column("of read", lambda row: f"{row.gb_per_s / memory.read_gb_per_s:.0%}"),
        Column("of copy", lambda row: f"{row.gb_per_s / memory.copy_gb_per_s:.0%}"),
    ]
    where = "device memory"
    if memory.threads is not None:
        where = f"{memory.threads} CPU thread{'' if memory.threads == 1 else 's'}"
    notes = [
        f"memory, {where}, {memory.buffer_bytes >> 20} MiB touched:",
        f"  read {memory.read_gb_per_s:.1f} GB/s (reduced to one value; weights are only read)",
        f"  copy {memory.copy_gb_per_s:.1f} GB/s (bytes read + bytes written)",
    ]
    if memory.cache_bytes and result.weight_bytes < memory.cache_bytes:
        notes.append(
            f"  the weights may stay in the {memory.cache_bytes >> 20} MiB cache: "
            "forwards may beat memory"
        )
    weights = f"{result.weight_bytes / 1e6:.0f} MB of weights"
    title = f"one forward, {weights}, median of {result.repeats}"
    return build_table(columns, result.steps, title=title, notes=notes)
