"""Variants without a model: their speed and their tokens are given."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ssd_jax.tools.bench.prompts import BenchPrompt
from ssd_jax.tools.bench.run import PromptResult


def prompts(count: int) -> list[BenchPrompt]:
    return [
        BenchPrompt(set="fake", index=index, prompt=f"prompt {index}") for index in range(count)
    ]


def result(
    ids: Sequence[int] = (1, 2, 3),
    *,
    tokens_per_second: float = 10.0,
    ttft: float = 0.5,
    metrics: dict | None = None,
) -> PromptResult:
    """Tokens at an even pace after the first."""
    times = [ttft + place / tokens_per_second for place in range(len(ids))]
    return PromptResult.from_times(ids, start=0.0, token_times=times, metrics=metrics)


def recorded(
    name: str, log: list[tuple[str, int]], run: Callable[[BenchPrompt], PromptResult] | None = None
) -> Callable[[BenchPrompt], PromptResult]:
    """A variant that notes (its name, the prompt's index) when it is called."""

    def variant(prompt: BenchPrompt) -> PromptResult:
        log.append((name, prompt.index))
        return run(prompt) if run else result()

    return variant
