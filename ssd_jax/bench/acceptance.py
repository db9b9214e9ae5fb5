"""How many proposed tokens were accepted, summed over all prompts of a variant."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.table import Table
from rich.text import Text

from ssd_jax.bench.run import BenchResult
from ssd_jax.bench.table import Column, build_table, number_cell


@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """One variant's rounds.

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
    found = (_of(name, result) for name in result.variants)
    return [entry for entry in found if entry is not None]


def acceptance_json(entries: Sequence[Acceptance]) -> list[dict[str, Any]]:
    """For `json.dumps`."""
    return [dataclasses.asdict(entry) for entry in entries]


def acceptance_table(entries: Sequence[Acceptance]) -> Table:
    """Two lines a variant: the shares of rounds by tokens, and of tokens accepted by position."""
    most = max(len(entry.histogram) for entry in entries)
    lines = [line for entry in entries for line in _lines(entry)]
    columns: list[Column[_Line]] = [
        Column(title="variant", cell=lambda line: Text(line.variant, style="cyan"), justify="left"),
        Column(title="", cell=lambda line: Text(line.what), justify="left"),
    ]
    columns += [Column(title=str(n + 1), cell=_share(n)) for n in range(most)]
    return build_table(columns, lines, title="acceptance")


@dataclasses.dataclass(frozen=True)
class _Line:
    variant: str
    what: str
    shares: Sequence[float | None]


def _lines(entry: Acceptance) -> list[_Line]:
    positions = [accepted / judged if judged else None for accepted, judged in entry.by_position]
    return [
        _Line(entry.variant, "rounds by tokens", [n / entry.rounds for n in entry.histogram]),
        _Line("", "accepted at position", positions),
    ]


def _share(place: int):
    def cell(line: _Line) -> str | None:
        value = line.shares[place] if place < len(line.shares) else None
        return number_cell(value, "{:.2f}")

    return cell


def _of(variant: str, result: BenchResult) -> Acceptance | None:
    metrics = [repeat.metrics for runs in result.of(variant) for repeat in runs.results]
    metrics = [each for each in metrics if each.get("acceptance_histogram")]
    if not metrics:
        return None
    histograms = [each["acceptance_histogram"] for each in metrics]
    histogram = tuple(map(sum, zip_longest(*histograms, fillvalue=0)))
    positions = [each["acceptance_by_position"] for each in metrics]
    by_position = tuple(
        (sum(accepted for accepted, _ in column), sum(judged for _, judged in column))
        for column in zip_longest(*positions, fillvalue=(0, 0))
    )
    rounds = sum(histogram)
    tokens = sum((place + 1) * count for place, count in enumerate(histogram))
    return Acceptance(
        variant=variant,
        rounds=rounds,
        length=tokens / rounds,
        histogram=histogram,
        by_position=by_position,
    )
