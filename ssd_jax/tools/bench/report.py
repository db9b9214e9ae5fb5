"""Paired runs as a line of figures for each variant: a table for people, JSON for programs."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from rich.text import Text

from ssd_jax.tools.bench import stats
from ssd_jax.tools.bench.run import BenchResult, PairedRuns, PromptResult, first_difference
from ssd_jax.tools.bench.stats import FEWEST_FOR_INTERVAL, Estimate, Rate
from ssd_jax.tools.bench.table import (
    Column,
    Page,
    build_table,
    estimate_cell,
    median_cell,
    pluralize,
)

SCHEMA_VERSION = 2
"""Version of every suite's JSON; raised when a key changes its meaning or goes away."""
ITL_PERCENTS = (50, 95, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantSummary:
    """Figures of one variant over all prompts; None where nothing was measured.

    Attributes:
      tokens: generated tokens of all prompts and repeats.
      decode_tokens_per_second: tokens over decoding seconds, of all prompts and repeats together.
      ratio: the quotient of this and the base's; None for the base.
      itl_ms: P50, P95, P99 over every token of every repeat.
      identical: prompts whose token ids equal the base's in every repeat, none of which failed.
        For the base itself, its repeats are compared; None if it has one only.
      metrics: medians over prompts of the numbers in `PromptResult.metrics`.
    """

    variant: str
    prompts: int
    tokens: int
    decode_tokens_per_second: Estimate | None
    ratio: Estimate | None
    ttft_ms: Estimate | None
    itl_ms: list[float] | None
    identical: int | None
    metrics: Mapping[str, Estimate]


def summarize(result: BenchResult) -> list[VariantSummary]:
    """One summary for each variant, in order."""
    return [_summary(result, name) for name in result.variants]


def speed_ratio(result: BenchResult, variant: str, base: str) -> Estimate | None:
    """Decoding speed of one variant against another: the quotient of their totals."""
    return stats.rate_ratio_interval(*(_rates(result.runs_of(name)) for name in (variant, base)))


def bench_content(result: BenchResult) -> dict[str, Any]:
    """The content of a `document` about paired runs."""
    variants = []
    for summary in summarize(result):
        variants.append(dataclasses.asdict(summary))
        itl = variants[-1].pop("itl_ms") or [None] * len(ITL_PERCENTS)
        variants[-1] |= {f"itl_p{n}_ms": ms for n, ms in zip(ITL_PERCENTS, itl, strict=True)}
    bases = result.runs_of(result.variants[0])
    rows = [
        {
            "set": runs.prompt.set,
            "index": runs.prompt.index,
            "variant": runs.variant,
            "tokens": [len(run.token_ids) for run in runs.results],
            "decode_tokens_per_second": [run.decode_tokens_per_second for run in runs.results],
            "ttft_ms": [run.ttft_ms for run in runs.results],
            "itl_p50_p95_p99_ms": [_itl([run]) for run in runs.results],
            "first_difference": _first_difference(runs, bases[index // len(result.variants)]),
            "token_ids": list(runs.results[0].token_ids),
            "metrics": [dict(run.metrics) for run in runs.results],
        }
        for index, runs in enumerate(result.runs)
    ]
    return {"base": result.variants[0], "variants": variants, "prompts": rows}


def document(
    suite: str, *, settings: Mapping[str, Any], environment: Mapping[str, Any], **content: Any
) -> dict[str, Any]:
    """A suite's results as an object for `json.dumps`.

    It has the flags as `settings`, what `environment.describe` returned, and `json_safe` content.
    """
    head = {"schema_version": SCHEMA_VERSION, "suite": suite, **environment}
    return json_safe({**head, "settings": dict(settings), **content})


def json_safe(value: Any) -> Any:
    """A copy in JSON's own types: records as objects, NumPy's numbers as Python's, NaN and
    infinities as null."""

    def plain(number: object) -> object:
        return number.item() if isinstance(number, np.generic) else str(number)

    return msgspec.json.decode(msgspec.json.encode(value, enc_hook=plain))


def bench_table(result: BenchResult) -> Page:
    """The figures of each variant; columns that no variant has a value for are left out."""
    summaries = summarize(result)
    sets = Counter(prompt.set for prompt in result.prompts)
    counts = ", ".join(f"{count} {name}" for name, count in sets.items())
    prompts = pluralize(len(result.prompts), "prompt")
    title = f"{prompts} ({counts}), {pluralize(len(result.runs[0].results), 'repeat')}"
    return build_table(_COLUMNS, summaries, title=title, notes=_notes(result, summaries))


def _summary(result: BenchResult, variant: str) -> VariantSummary:
    runs, base = result.runs_of(variant), result.variants[0]
    results = [run for repeats in runs for run in repeats.results]
    equal = [
        _first_difference(repeats, base_runs) is None
        and not any(run.failed for run in (*repeats.results, *base_runs.results))
        for repeats, base_runs in zip(runs, result.runs_of(base), strict=True)
    ]
    metrics = {
        key: _estimate(runs, lambda run, key=key: _number(run.metrics.get(key)))
        for key in dict.fromkeys(key for run in results for key in run.metrics)
    }
    return VariantSummary(
        variant=variant,
        prompts=len(runs),
        tokens=sum(len(run.token_ids) for run in results),
        decode_tokens_per_second=stats.rate_interval(_rates(runs)),
        ratio=None if variant == base else speed_ratio(result, variant, base),
        ttft_ms=_estimate(runs, lambda run: run.ttft_ms),
        itl_ms=_itl(results),
        identical=None if variant == base and len(runs[0].results) == 1 else sum(equal),
        metrics={key: estimate for key, estimate in metrics.items() if estimate is not None},
    )


def _estimate(
    runs: Sequence[PairedRuns], value: Callable[[PromptResult], float | None]
) -> Estimate | None:
    medians = [repeats.median(value) for repeats in runs]
    return stats.median_interval([median for median in medians if median is not None])


def _rates(runs: Sequence[PairedRuns]) -> list[Rate]:
    """Tokens after the first, and the seconds since it, of all repeats of each prompt."""
    gaps = [[ms for run in repeats.results for ms in run.itl_ms] for repeats in runs]
    return [Rate(len(ms), sum(ms) / 1e3) for ms in gaps]


def _itl(results: Sequence[PromptResult]) -> list[float] | None:
    gaps = [ms for run in results for ms in run.itl_ms]
    return np.percentile(gaps, ITL_PERCENTS).tolist() if gaps else None


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return None
    return float(value) if math.isfinite(value) else None


def _first_difference(runs: PairedRuns, base: PairedRuns) -> int | None:
    """The earliest place where a repeat differs from the base's first repeat."""
    ids = base.results[0].token_ids
    indices = [first_difference(run.token_ids, ids) for run in runs.results]
    return min((index for index in indices if index is not None), default=None)


def identical_cell(row: VariantSummary) -> Text | None:
    """Whether all prompts have the base's tokens; if not, the number that do."""
    if row.identical is None:
        return None
    if row.identical == row.prompts:
        return Text("yes", style="green")
    return Text(f"no\n{row.identical}/{row.prompts}", style="red")


def _gap(title: str, index: int) -> Column[VariantSummary]:
    return Column(title, lambda row: None if row.itl_ms is None else f"{row.itl_ms[index]:.1f}")


def _metric(title: str, name: str) -> Column[VariantSummary]:
    return Column(title, lambda row: median_cell(row.metrics.get(name), "{:.2f}"))


SPEED_COLUMNS: tuple[Column[VariantSummary], ...] = (
    Column("tokens/s", lambda row: estimate_cell(row.decode_tokens_per_second, "{:.1f}")),
    Column("ratio", lambda row: estimate_cell(row.ratio, "{:.2f}x")),
    Column("first\ntoken ms", lambda row: median_cell(row.ttft_ms, "{:.0f}")),
)
DRAFT_COLUMNS: tuple[Column[VariantSummary], ...] = (
    _metric("tokens\na round", "acceptance_length"),
    _metric("hit\nrate", "hit_rate"),
    _metric("hidden\ndraft", "hidden_draft_share"),
)
_COLUMNS: tuple[Column[VariantSummary], ...] = (
    Column("variant", lambda row: Text(row.variant, style="cyan"), "left"),
    *SPEED_COLUMNS,
    _gap("gap ms\nP50", 0),
    _gap("\nP95", 1),
    _gap("\nP99", 2),
    *DRAFT_COLUMNS,
    Column("same\nids", identical_cell),
)


def _notes(result: BenchResult, summaries: Sequence[VariantSummary]) -> list[str]:
    notes = [
        "tokens/s: decoding, no prefill, of all prompts together; gap: time between tokens",
        "first token and what is of the draft: medians over the prompts",
    ]
    if len(summaries) > 1:
        notes.append(f"ratio: of tokens/s to those of {result.variants[0]}")
        notes.append(f"same ids: as {result.variants[0]} in every repeat")
    elif summaries[0].identical is not None:
        notes.append("same ids: in every repeat")
    if any("hidden_draft_share" in summary.metrics for summary in summaries):
        notes.append("hidden draft: share of the draft's time beside the target's")
    if len(result.prompts) < FEWEST_FOR_INTERVAL:
        notes.append(f"no 95% intervals: they need {FEWEST_FOR_INTERVAL} prompts or more")
    else:
        notes.append("second lines: 95% bootstrap intervals, prompts resampled")
    return notes
