"""llama.cpp as an engine of `bench_engines.py`, through the package llama-cpp-python."""

from __future__ import annotations

import itertools
import time
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from bench_engines import Measurement, Workload
from llama_cpp.llama_speculative import LlamaDraftModel, LlamaPromptLookupDecoding

CONTEXT = 1024


class LlamaCpp:
    """llama.cpp on the file's own quantised weights: alone, with prompt lookup or with a draft.

    Raises:
      ValueError: prompts that are not token ids.
    """

    def __init__(self, workload: Workload, loop: str) -> None:
        if not all("ids" in line for line in workload.prompts):
            raise ValueError("llama.cpp is given token ids; make the file with prompt_ids.py")
        self._workload = workload
        self._draft: Any = None
        if loop == "lookup":
            self._draft = LlamaPromptLookupDecoding(num_pred_tokens=workload.k)
        elif loop == "draft":
            self._draft = ModelDraft(self._open(workload.draft), workload.k)
        self._llama = self._open(workload.model)

    def versions(self) -> dict[str, str]:
        return {
            "llama-cpp-python": llama_cpp.__version__,
            "llama.cpp": llama_cpp.llama_print_system_info().decode(),
        }

    def generate(self, index: int) -> Measurement:
        self._llama.reset()  # else the prompt's keys and values of the last run are used again
        times, ids = [], []
        tokens = self._llama.generate(self._workload.prompts[index]["ids"], temp=0.0)
        for token in itertools.islice(tokens, self._workload.max_tokens):
            times.append(time.perf_counter())
            ids.append(int(token))
        return Measurement(tokens_per_second=(len(ids) - 1) / (times[-1] - times[0]), token_ids=ids)

    def _open(self, file: Path) -> Any:
        threads = self._workload.threads
        return llama_cpp.Llama(
            str(file),
            n_ctx=CONTEXT,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=self._draft,
            verbose=False,
        )


class ModelDraft(LlamaDraftModel):
    """The k likeliest tokens, one after another, of a smaller model."""

    def __init__(self, llama: Any, k: int) -> None:
        self._llama, self._k = llama, k

    def __call__(self, input_ids: Any, /, **_: Any) -> Any:
        tokens = self._llama.generate(input_ids.tolist(), temp=0.0)  # keeps what it has read
        return np.fromiter(itertools.islice(tokens, self._k), np.intc)
