"""`--suite=step`: what a forward of 1, 2, 3, ... tokens costs, and how fast weights are read."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

import numpy as np

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.tools.bench.bandwidth import Bandwidth
from ssd_jax.tools.bench.stats import Estimate, estimate_of
from ssd_jax.tools.bench.table import Column, Page, build_table, interval, pluralize

WIDTHS = range(1, 18)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepRow:
    """One width: a forward of that many tokens.

    Attributes:
      ms: median over the repeats.
      dispatch_ms: until the call returns, while the forward still runs.
      ratio: against width 1, paired by repeat.
      weight_bytes: of the weights that each device reads.
      gb_per_s: these over the median time, in 1e9 bytes per second of each device.
    """

    width: int
    ms: Estimate
    dispatch_ms: Estimate
    ratio: Estimate
    weight_bytes: int
    gb_per_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepResult:
    """All widths, in the order given; `weight_bytes` is what the widest one reads."""

    weight_bytes: int
    repeats: int
    steps: tuple[StepRow, ...]


def in_turns(
    runs: Sequence[Callable[[], object]],
    *,
    rounds: int,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> list[list[float]]:
    """Times several functions in turn, every second round reversed, so that drift hits all alike.

    Args:
      rounds: over all of them.

    Returns: for each, the milliseconds by round.
    """
    ms: list[list[float]] = [[] for _ in runs]
    for round_ in range(rounds):
        for index in range(len(runs)) if round_ % 2 == 0 else reversed(range(len(runs))):
            start = clock()
            runs[index]()
            ms[index].append(1e3 * (clock() - start))
        if progress is not None:
            progress(round_ + 1, rounds)
    return ms


def time_steps(
    forward: Callable[[int], Callable[[], Callable[[], object]]],
    *,
    weight_bytes: Callable[[int], int],
    widths: Sequence[int] = WIDTHS,
    repeats: int = 20,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
    progress: Progress | None = None,
) -> StepResult:
    """Times forwards of several widths; see `in_turns`.

    Args:
      forward: maps a width to a callable that dispatches one forward of that many tokens and
        returns a callable that waits for it. All are made before the first is timed.
      weight_bytes: maps a width to the bytes of weights that each device reads in one forward.
      widths: tokens of a forward, different from each other, 1 among them.
      warmup: untimed runs of each width at first.
    """
    dispatch_ms: dict[int, list[float]] = {width: [] for width in widths}

    def make_run(width: int) -> Callable[[], object]:
        dispatch = forward(width)

        def run() -> None:
            start = clock()
            wait = dispatch()
            dispatch_ms[width].append(1e3 * (clock() - start))
            wait()

        return run

    runs = [make_run(width) for width in widths]
    for run in runs:
        for _ in range(warmup):
            run()
    ms = dict(
        zip(widths, in_turns(runs, rounds=repeats, clock=clock, progress=progress), strict=True)
    )
    steps = []
    for width, width_ms in ms.items():
        estimate, nbytes = estimate_of(width_ms), weight_bytes(width)
        steps.append(
            StepRow(
                width=width,
                ms=estimate,
                dispatch_ms=estimate_of(dispatch_ms[width][warmup:]),
                ratio=estimate_of(np.divide(width_ms, ms[1]).tolist()),
                weight_bytes=nbytes,
                gb_per_s=nbytes / estimate.value / 1e6,
            )
        )
    most = max(row.weight_bytes for row in steps)
    return StepResult(steps=tuple(steps), weight_bytes=most, repeats=repeats)


def step_table(result: StepResult, memory: Bandwidth) -> Page:
    """The cost of each width, with the machine's bandwidth below."""
    columns: list[Column[StepRow]] = [
        Column("tokens", lambda row: str(row.width)),
        Column("ms", lambda row: f"{row.ms.value:.2f}"),
        Column("95% interval", lambda row: interval(row.ms, "{:.2f}")),
        Column("dispatch", lambda row: f"{row.dispatch_ms.value:.2f}"),
        Column("/ 1 token", lambda row: f"{row.ratio.value:.2f}x"),
        Column("weights GB/s", lambda row: f"{row.gb_per_s:.1f}"),
        Column("of read", lambda row: f"{row.gb_per_s / memory.read_gb_per_s:.0%}"),
        Column("of copy", lambda row: f"{row.gb_per_s / memory.copy_gb_per_s:.0%}"),
    ]
    medium = "device memory" if memory.threads is None else pluralize(memory.threads, "CPU thread")
    notes = [
        "dispatch: ms until the call returns, while the forward still runs",
        f"memory, {medium}, {memory.buffer_bytes >> 20} MiB touched:",
        f"  read {memory.read_gb_per_s:.1f} GB/s (reduced to one value; weights are only read)",
        f"  copy {memory.copy_gb_per_s:.1f} GB/s (bytes read + bytes written)",
    ]
    if memory.cache_bytes and result.weight_bytes < memory.cache_bytes:
        notes.append(
            f"  the weights may stay in the {memory.cache_bytes >> 20} MiB cache: "
            "forwards may beat memory"
        )
    least = min(row.weight_bytes for row in result.steps)
    sizes = " to ".join(f"{size / 1e6:.0f}" for size in dict.fromkeys((least, result.weight_bytes)))
    if least < result.weight_bytes:
        notes.append("weights: of experts as many as tokens use, if all are chosen alike")
    weights = f"{sizes} MB of weights a device"
    title = f"one forward, {weights}, median of {result.repeats}"
    return build_table(columns, result.steps, title=title, notes=notes)
