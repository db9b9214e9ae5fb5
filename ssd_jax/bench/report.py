"""A bench result as a table for people and as JSON for programs."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table
from rich.text import Text

from ssd_jax.bench.run import BenchResult
from ssd_jax.bench.stats import FEWEST_FOR_INTERVAL, Estimate
from ssd_jax.bench.summary import VariantSummary, prompt_rows, summarize
from ssd_jax.bench.table import Column, build_table, estimate_cell, number_cell

SCHEMA_VERSION = 1
"""Of the JSON of every suite; goes up when a key changes its meaning or goes away."""


def bench_json(
    result: BenchResult, *, settings: Mapping[str, Any], environment: Mapping[str, Any]
) -> dict[str, Any]:
    """The whole result as an object for `json.dumps`.

    Args:
      result: from `run_paired`.
      settings: how it was run, such as flags; values must be fit for JSON.
      environment: from `environment.describe`.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "suite": "prompts",
        **environment,
        "settings": dict(settings),
        "base": result.variants[0],
        "variants": [_variant(summary) for summary in summarize(result)],
        "prompts": prompt_rows(result),
    }
    return json_safe(document)


def bench_table(result: BenchResult) -> Table:
    """The figures of each variant; columns that no variant has a value for are left out."""
    summaries = summarize(result)
    sets = Counter(prompt.set for prompt in result.prompts)
    count = len(result.prompts)
    repeats = len(result.runs[0].results)
    return build_table(
        _COLUMNS,
        summaries,
        title=(
            f"{_plural(count, 'prompt')} ({', '.join(f'{n} {s}' for s, n in sets.items())}), "
            f"{_plural(repeats, 'repeat')}"
        ),
        notes=_notes(result, summaries),
    )


def json_safe(value: Any) -> Any:
    """A copy in JSON's own types: NumPy's numbers as Python's, NaN and infinities as null."""
    if isinstance(value, Mapping):
        return {str(key): json_safe(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe(item) for item in value]
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _variant(summary: VariantSummary) -> dict[str, Any]:
    document = dataclasses.asdict(summary)
    itl = document.pop("itl_ms") or (None, None, None)
    names = ("itl_p50_ms", "itl_p95_ms", "itl_p99_ms")
    return document | dict(zip(names, itl, strict=True))


def _identical(summary: VariantSummary) -> Text | None:
    if summary.identical is None:
        return None
    if summary.identical == summary.prompts:
        return Text("yes", style="green")
    return Text(f"no\n{summary.identical}/{summary.prompts}", style="red")


def _itl(place: int):
    return lambda row: number_cell(row.itl_ms and row.itl_ms[place], "{:.1f}")


def _median(estimate: Estimate | None, form: str) -> str | None:
    return number_cell(estimate and estimate.median, form)


def _metric(name: str):
    return lambda row: _median(row.metrics.get(name), "{:.2f}")


_COLUMNS: tuple[Column[VariantSummary], ...] = (
    Column(title="variant", cell=lambda row: Text(row.variant, style="cyan"), justify="left"),
    Column(
        title="tokens/s", cell=lambda row: estimate_cell(row.decode_tokens_per_second, "{:.1f}")
    ),
    Column(title="ratio", cell=lambda row: estimate_cell(row.ratio, "{:.2f}x")),
    Column(title="first\ntoken ms", cell=lambda row: _median(row.ttft_ms, "{:.0f}")),
    Column(title="gap ms\nP50", cell=_itl(0)),
    Column(title="\nP95", cell=_itl(1)),
    Column(title="\nP99", cell=_itl(2)),
    Column(title="accepted\nlength", cell=_metric("acceptance_length")),
    Column(title="hit\nrate", cell=_metric("hit_rate")),
    Column(title="hidden\ndraft", cell=_metric("hidden_draft_share")),
    Column(title="same\nids", cell=_identical),
)


def _notes(result: BenchResult, summaries: list[VariantSummary]) -> list[str]:
    count = len(result.prompts)
    notes = ["tokens/s: decoding, no prefill; medians over prompts; gap: time between tokens"]
    if len(summaries) > 1:
        notes.append(f"ratio: of tokens/s against {result.variants[0]}, paired by prompt")
        notes.append(f"same ids: as {result.variants[0]} in every repeat")
    elif summaries[0].identical is not None:
        notes.append("same ids: in every repeat")
    if any("hidden_draft_share" in summary.metrics for summary in summaries):
        notes.append("hidden draft: share of the draft's time beside the target's")
    if count < FEWEST_FOR_INTERVAL:
        notes.append(f"no 95% intervals: they need {FEWEST_FOR_INTERVAL} prompts or more")
    else:
        notes.append("second lines: 95% bootstrap intervals of the medians")
    return notes


def _plural(count: int, noun: str) -> str:
    return f"{count} {noun}" + ("" if count == 1 else "s")
