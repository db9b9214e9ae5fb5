"""`--suite=step`: what a forward of 1, 2, 3, ... tokens costs, and how fast weights are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from ssd_jax.bench.bandwidth import Bandwidth
from ssd_jax.bench.report import SCHEMA_VERSION, json_safe
from ssd_jax.bench.stats import Estimate, median_interval, ratio_interval
from ssd_jax.bench.table import Column, build_table, number_cell
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

    rows: tuple[StepRow, ...]
    weight_bytes: int
    repeats: int


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
    seconds: dict[int, list[float]] = {width: [] for width in widths}
    for repeat in range(repeats):
        for width in widths if repeat % 2 == 0 else reversed(widths):
            start = clock()
            runs[width]()
            seconds[width].append(clock() - start)
        if progress is not None:
            progress(repeat + 1, repeats)
    return StepResult(
        rows=tuple(_row(width, seconds, weight_bytes) for width in widths),
        weight_bytes=weight_bytes,
        repeats=repeats,
    )


def step_json(
    result: StepResult,
    bandwidth: Bandwidth,
    *,
    settings: Mapping[str, Any],
    environment: Mapping[str, Any],
) -> dict[str, Any]:
    """The whole result as an object for `json.dumps`; see `report.bench_json`."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "suite": "step",
        **environment,
        "settings": dict(settings),
        "weight_bytes": result.weight_bytes,
        "repeats": result.repeats,
        "bandwidth": dataclasses.asdict(bandwidth),
        "steps": [dataclasses.asdict(row) for row in result.rows],
    }
    return json_safe(document)


def step_table(result: StepResult, bandwidth: Bandwidth) -> Table:
    """The cost of each width, with the machine's bandwidth below."""
    columns: tuple[Column[StepRow], ...] = (
        Column(title="tokens", cell=lambda row: str(row.width)),
        Column(title="ms", cell=lambda row: f"{row.ms.median:.2f}"),
        Column(title="95% interval", cell=_interval),
        Column(
            title="/ 1 token",
            cell=lambda row: number_cell(row.ratio and row.ratio.median, "{:.2f}x"),
        ),
        Column(title="weights GB/s", cell=lambda row: f"{row.gb_per_s:.1f}"),
        Column(
            title="of read",
            cell=lambda row: f"{row.gb_per_s / bandwidth.read_gb_per_s:.0%}",
        ),
        Column(
            title="of copy",
            cell=lambda row: f"{row.gb_per_s / bandwidth.copy_gb_per_s:.0%}",
        ),
    )
    return build_table(
        columns,
        result.rows,
        title=f"one forward, {result.weight_bytes / 1e6:.0f} MB of weights, "
        f"median of {result.repeats}",
        notes=_notes(result, bandwidth),
    )


def _row(width: int, seconds: Mapping[int, list[float]], weight_bytes: int) -> StepRow:
    times = seconds[width]
    ms = median_interval([1e3 * value for value in times])
    assert ms is not None  # repeats >= 1
    return StepRow(
        width=width,
        ms=ms,
        ratio=ratio_interval(times, seconds[1]) if 1 in seconds else None,
        gb_per_s=weight_bytes / ms.median / 1e6,
    )


def _interval(row: StepRow) -> str | None:
    if row.ms.low is None or row.ms.high is None:
        return None
    return f"{row.ms.low:.2f}-{row.ms.high:.2f}"


def _notes(result: StepResult, bandwidth: Bandwidth) -> list[str]:
    where = "device memory"
    if bandwidth.threads is not None:
        plural = "" if bandwidth.threads == 1 else "s"
        where = f"{bandwidth.threads} CPU thread{plural}"
    notes = [
        f"memory, {where}, {bandwidth.buffer_bytes >> 20} MiB touched:",
        f"  read {bandwidth.read_gb_per_s:.1f} GB/s (reduced to one value; weights are only read)",
        f"  copy {bandwidth.copy_gb_per_s:.1f} GB/s (bytes read + bytes written)",
    ]
    if bandwidth.cache_bytes and result.weight_bytes < bandwidth.cache_bytes:
        notes.append(
            f"  the weights may stay in the {bandwidth.cache_bytes >> 20} MiB cache: "
            "forwards may beat memory"
        )
    return notes
