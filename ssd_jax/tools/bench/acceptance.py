"""Acceptance of proposed tokens, summed over all prompts of a variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest

from rich.text import Text

from ssd_jax.tools.bench.run import BenchResult
from ssd_jax.tools.bench.table import Column, Page, build_table, number_cell

_Line = tuple[str, str, Sequence[float | None]]
"""Variant, what is shown, and its shares."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """Acceptance over the rounds of one variant.

    Attributes:
      rounds: target forwards.
      length: tokens committed per round, bonus included.
      histogram: rounds that committed 1, 2, ... tokens.
      by_position: (accepted, judged) for the first, second, ... proposed token of a round.
    """

    variant: str
    rounds: int
    length: float
    histogram: tuple[int, ...]
    by_position: tuple[tuple[int, int], ...]


def acceptance(result: BenchResult) -> list[Acceptance]:
    """One entry for each variant that proposed tokens."""
    entries = []
    for variant in result.variants:
        runs = [repeat.metrics for runs in result.runs_of(variant) for repeat in runs.results]
        metrics = [run_metrics for run_metrics in runs if run_metrics.get("acceptance_histogram")]
        if not metrics:
            continue
        histograms = zip_longest(
            *(run_metrics["acceptance_histogram"] for run_metrics in metrics), fillvalue=0
        )
        histogram = tuple(map(sum, histograms))
        positions = zip_longest(
            *(run_metrics["acceptance_by_position"] for run_metrics in metrics), fillvalue=(0, 0)
        )
        rounds = sum(histogram)
        entry = Acceptance(
            variant=variant,
            rounds=rounds,
            length=sum(tokens * count for tokens, count in enumerate(histogram, start=1)) / rounds,
            histogram=histogram,
            by_position=tuple(
                (sum(accepted for accepted, _ in column), sum(judged for _, judged in column))
                for column in positions
            ),
        )
        entries.append(entry)
    return entries


def acceptance_table(entries: Sequence[Acceptance]) -> Page:
    """Two lines a variant: the shares of rounds by tokens, and of tokens accepted by position."""
    lines: list[_Line] = []
    for entry in entries:
        rounds = [count / entry.rounds for count in entry.histogram]
        shares = [accepted / judged if judged else None for accepted, judged in entry.by_position]
        lines.append((entry.variant, "rounds by tokens", rounds))
        lines.append(("", "accepted at position", shares))
    columns: list[Column[_Line]] = [
        Column(title="variant", cell=lambda line: Text(line[0], style="cyan"), justify="left"),
        Column(title="", cell=lambda line: Text(line[1]), justify="left"),
    ]
    num_columns = max(len(entry.histogram) for entry in entries)
    columns += [Column(title=str(n + 1), cell=partial(_share_cell, n)) for n in range(num_columns)]
    return build_table(columns, lines, title="acceptance")


def _share_cell(index: int, line: _Line) -> str | None:
    return number_cell(line[2][index] if index < len(line[2]) else None, "{:.2f}")
