"""One prompt through an `LLM`, timed."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from ssd_jax.bench.prompts import Prompt
from ssd_jax.bench.run import PromptResult
from ssd_jax.runtime.request import SamplingParams

if TYPE_CHECKING:
    from ssd_jax.llm import LLM


def prompt_result(
    llm: LLM, prompt: Prompt, params: SamplingParams, mode: str, k: int | None
) -> PromptResult:
    """Runs one prompt alone and notes when each token came, if it ends as it should."""
    request = llm.request(prompt.content, params, prompt.index)
    started, ids, times = time.perf_counter(), [], []
    for event in llm.run([request], mode, k):
        now = time.perf_counter()
        ids += event.token_ids
        times += [now] * len(event.token_ids)
        if event.output is not None and event.output.finish_reason == "error":
            return PromptResult.of_failure(ids)
        if event.output is not None:
            return PromptResult.from_times(
                ids, started=started, token_times=times, metrics=event.output.metrics
            )
    raise AssertionError("a request ends with an output")
