"""Paired runs: every prompt through every variant, in alternating orders so that drift hits all."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.tools.bench.prompts import BenchPrompt

if TYPE_CHECKING:
    from ssd_jax.llm.llm import LLM


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptResult:
    """The result of one run of one prompt through one variant.

    Attributes:
      token_ids: generated ids, with the stop id if one ended them.
      ttft_ms: from the request to the first token; None without tokens.
      itl_ms: time between each token and the one before it: one value a token after the first.
        Tokens committed together are 0 ms apart.
      decode_tokens_per_second: tokens after the first over the time since the first, so that
        prefill does not count; None where there is no such time.
      metrics: anything else that was measured, such as acceptance_length; numbers are summarised.
      failed: whether it ended with finish_reason `error`; nothing else was measured then.
    """

    token_ids: tuple[int, ...]
    ttft_ms: float | None = None
    itl_ms: tuple[float, ...] = ()
    decode_tokens_per_second: float | None = None
    metrics: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    failed: bool = False

    @classmethod
    def from_times(
        cls,
        token_ids: Sequence[int],
        *,
        start: float,
        token_times: Sequence[float],
        metrics: Mapping[str, Any] | None = None,
    ) -> PromptResult:
        """Makes a result from the times, in seconds, of the request's start and each token."""
        gaps = np.diff(np.asarray(token_times, np.float64))
        seconds = float(gaps.sum())
        return cls(
            token_ids=tuple(token_ids),
            ttft_ms=1e3 * (token_times[0] - start) if token_times else None,
            itl_ms=tuple((1e3 * gaps).tolist()),
            decode_tokens_per_second=len(gaps) / seconds if seconds > 0 else None,
            metrics=dict(metrics or {}),
        )


def prompt_result(
    llm: LLM, prompt: BenchPrompt, params: SamplingParams, mode: str, k: int | None
) -> PromptResult:
    """Runs one prompt alone and records when each token arrives, unless the run fails."""
    request = llm.request(prompt.content, params, prompt.index)
    start, ids, times = time.perf_counter(), [], []
    for event in llm.run([request], mode, k):
        now = time.perf_counter()
        ids += event.token_ids
        times += [now] * len(event.token_ids)
        if event.output is not None and event.output.finish_reason == "error":
            return PromptResult(token_ids=tuple(ids), failed=True)
        if event.output is not None:
            metrics = event.output.metrics
            return PromptResult.from_times(ids, start=start, token_times=times, metrics=metrics)
    raise AssertionError("a request ends with an output")


Variant = Callable[[BenchPrompt], PromptResult]


@dataclasses.dataclass(frozen=True, kw_only=True)
class PairedRuns:
    """All repeats of one variant on one prompt."""

    variant: str
    prompt: BenchPrompt
    results: tuple[PromptResult, ...]

    def median(self, value: Callable[[PromptResult], float | None]) -> float | None:
        """The median over the repeats that have the value; None if none has."""
        values = [number for result in self.results if (number := value(result)) is not None]
        return float(np.median(values)) if values else None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchResult:
    """Results of all variants on the same prompts.

    Attributes:
      variants: names; the first is the base that ratios and equality refer to.
      runs: one entry for each prompt and variant: by prompt, then by variant as in `variants`.
    """

    variants: tuple[str, ...]
    prompts: tuple[BenchPrompt, ...]
    runs: tuple[PairedRuns, ...]

    @property
    def failures(self) -> list[str]:
        """Each run that failed, by prompt and variant."""
        return [
            f"{runs.prompt.set}:{runs.prompt.index} {runs.variant}"
            for runs in self.runs
            for result in runs.results
            if result.failed
        ]

    def runs_of(self, variant: str) -> list[PairedRuns]:
        """The runs of one variant, in prompt order."""
        return [runs for runs in self.runs if runs.variant == variant]


def run_paired(
    variants: Mapping[str, Variant],
    prompts: Sequence[BenchPrompt],
    *,
    warmup: int,
    repeats: int,
    progress: Progress = lambda done, total: None,
) -> BenchResult:
    """Runs every prompt through every variant.

    A prompt's variants run one after the other, in orders that alternate from prompt to prompt and
    from repeat to repeat (A B, B A, ...; with more variants each takes every place equally often).

    Args:
      variants: callables by name, the base first. Each runs its prompt to the end.
      warmup: prompts that each variant runs first, unrecorded.
      repeats: passes over all prompts.
      progress: called with (runs done, runs in all), warm-up included, after each run.
    """
    total = len(variants) * (warmup + repeats * len(prompts))
    done = 0

    def run(name: str, prompt: BenchPrompt) -> PromptResult:
        nonlocal done
        result = variants[name](prompt)
        done += 1
        progress(done, total)
        return result

    for number in range(warmup):
        for name in variants:
            run(name, prompts[number % len(prompts)])
    orders = alternating_orders(tuple(variants))
    results: dict[tuple[str, int], list[PromptResult]] = {}  # by variant and place of the prompt
    for repeat in range(repeats):
        for index, prompt in enumerate(prompts):
            # By the sum, no prompt keeps its order in every repeat, for any number of prompts.
            for name in orders[(repeat + index) % len(orders)]:
                results.setdefault((name, index), []).append(run(name, prompt))
    return BenchResult(
        variants=tuple(variants),
        prompts=tuple(prompts),
        runs=tuple(
            PairedRuns(variant=name, prompt=prompt, results=tuple(results[name, index]))
            for index, prompt in enumerate(prompts)
            for name in variants
        ),
    )


def alternating_orders(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Orders to cycle through: the rotations of `names`, then those of its reverse.

    Each name takes each place equally often, and comes before each other one equally often.
    """
    rotations = [
        (*sequence[start:], *sequence[:start])
        for sequence in (tuple(names), tuple(reversed(names)))
        for start in range(len(names))
    ]
    return list(dict.fromkeys(rotations))


def first_difference(ids: Sequence[int], base: Sequence[int]) -> int | None:
    """Index of the first token that differs or is missing in one text; None if equal."""
    for index, (a, b) in enumerate(zip_longest(ids, base)):
        if a != b:
            return index
    return None
