"""From paired runs to one line of figures for each variant and one for each prompt."""

from __future__ import annotations

import dataclasses
import math
import numbers
from collections.abc import Mapping
from typing import Any

from ssd_jax.bench import stats
from ssd_jax.bench.run import BenchResult, PairedRuns, PromptResult, first_difference
from ssd_jax.bench.stats import Estimate

ITL_PERCENTS = (50, 95, 99)


@dataclasses.dataclass(frozen=True, kw_only=True)
class VariantSummary:
    """Figures of one variant over all prompts; None where nothing was measured.

    Attributes:
      variant: its name.
      prompts: number of prompts.
      tokens: generated tokens of all prompts and repeats.
      decode_tokens_per_second: median over prompts (each the median of its repeats).
      ratio: the same against the base, paired by prompt; None for the base.
      ttft_ms: median over prompts.
      itl_ms: P50, P95, P99 over every token of every repeat.
      identical: prompts whose token ids equal the base's in every repeat. For the base itself, its
        repeats are compared; None if it has one only.
      metrics: medians over prompts of the numbers in `PromptResult.metrics`.
    """

    variant: str
    prompts: int
    tokens: int
    decode_tokens_per_second: Estimate | None
    ratio: Estimate | None
    ttft_ms: Estimate | None
    itl_ms: tuple[float, ...] | None
    identical: int | None
    metrics: Mapping[str, Estimate]


def summarize(result: BenchResult) -> list[VariantSummary]:
    """One summary for each variant, in order."""
    base = {runs.prompt.key: runs for runs in result.of(result.variants[0])}
    return [_summary(result.of(name), base) for name in result.variants]


def speed_ratio(result: BenchResult, variant: str, base: str) -> Estimate | None:
    """Decoding speed of one variant against another, paired by prompt."""
    one, other = (_by_prompt(result.of(name), _speed) for name in (variant, base))
    return stats.ratio_interval(*stats.paired(one, other))


def prompt_rows(result: BenchResult) -> list[dict[str, Any]]:
    """A JSON object for each prompt and variant, with the lists of its repeats."""
    base = {runs.prompt.key: runs for runs in result.of(result.variants[0])}
    return [
        {
            "set": runs.prompt.set,
            "index": runs.prompt.index,
            "variant": runs.variant,
            "tokens": [len(repeat.token_ids) for repeat in runs.results],
            "decode_tokens_per_second": [
                repeat.decode_tokens_per_second for repeat in runs.results
            ],
            "ttft_ms": [repeat.ttft_ms for repeat in runs.results],
            "itl_p50_p95_p99_ms": [
                stats.percentiles(repeat.itl_ms, ITL_PERCENTS) for repeat in runs.results
            ],
            "first_difference": _first_difference(runs, base[runs.prompt.key]),
            "token_ids": list(runs.results[0].token_ids),
            "metrics": [dict(repeat.metrics) for repeat in runs.results],
        }
        for runs in result.runs
    ]


def _summary(runs: list[PairedRuns], base: Mapping[tuple[str, int], PairedRuns]) -> VariantSummary:
    speeds, ttfts = _by_prompt(runs, _speed), _by_prompt(runs, _ttft)
    base_runs = list(base.values())
    is_base = runs[0].variant == base_runs[0].variant
    pairs = stats.paired(speeds, _by_prompt(base_runs, _speed))
    equal = [_first_difference(item, base[item.prompt.key]) is None for item in runs]
    return VariantSummary(
        variant=runs[0].variant,
        prompts=len(runs),
        tokens=sum(len(repeat.token_ids) for item in runs for repeat in item.results),
        decode_tokens_per_second=_estimate(speeds),
        ratio=None if is_base else stats.ratio_interval(*pairs),
        ttft_ms=_estimate(ttfts),
        itl_ms=_itl(runs),
        identical=None if is_base and len(runs[0].results) == 1 else sum(equal),
        metrics=_metrics(runs),
    )


def _speed(result: PromptResult) -> float | None:
    return result.decode_tokens_per_second


def _ttft(result: PromptResult) -> float | None:
    return result.ttft_ms


def _by_prompt(runs: list[PairedRuns], value) -> dict[tuple[str, int], float | None]:
    return {item.prompt.key: item.median(value) for item in runs}


def _estimate(values: Mapping[tuple[str, int], float | None]) -> Estimate | None:
    return stats.median_interval([value for value in values.values() if value is not None])


def _itl(runs: list[PairedRuns]) -> tuple[float, ...] | None:
    times = [time for item in runs for repeat in item.results for time in repeat.itl_ms]
    found = stats.percentiles(times, ITL_PERCENTS)
    return None if found is None else tuple(found)


def _first_difference(runs: PairedRuns, base: PairedRuns) -> int | None:
    """The earliest place where a repeat leaves the base's first repeat."""
    reference = base.results[0].token_ids
    places = [first_difference(repeat.token_ids, reference) for repeat in runs.results]
    return min((place for place in places if place is not None), default=None)


def _metrics(runs: list[PairedRuns]) -> dict[str, Estimate]:
    names = dict.fromkeys(
        name for item in runs for repeat in item.results for name in repeat.metrics
    )
    found = {name: _estimate(_by_prompt(runs, _metric(name))) for name in names}
    return {name: estimate for name, estimate in found.items() if estimate is not None}


def _metric(name: str):
    def value(result: PromptResult) -> float | None:
        number = result.metrics.get(name)
        if isinstance(number, bool) or not isinstance(number, numbers.Real):
            return None
        return float(number) if math.isfinite(number) else None

    return value
