"""Prints hashes of logits, and texts, of a checkpoint; on one core or on all.

Run as `python -m tests.devices.opening.bitwise_worker one|all CHECKPOINT DTYPE... [texts]`.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys


def logits_hashes(path: str, dtype: str) -> dict[str, str]:
    """Of a text's logits at each width."""
    from tests.devices.forwards import Forwards

    forwards = Forwards.of(path, dtype, slots=2, context=200, widths=(0, 3))
    text = [(17 * place) % 250 for place in range(24)]
    return {
        str(width): hashlib.sha256(forwards.logits(text, width).tobytes()).hexdigest()
        for width in forwards.programs.widths
    }


def texts(path: str) -> list[list[int]]:
    """Sampled by the engine, autoregressive and speculative."""
    from ssd_jax import LLM, SamplingParams

    # A program from a cache may have been compiled for another number of threads.
    settings = {"compile_cache": "off", "exact": "bitwise", "context": 200}
    llm = LLM(path, mode="sd", draft="ngram", k="3", verify="coupled", **settings)
    params = SamplingParams(max_tokens=32, temperature=0.7, top_k=20, seed=1, ignore_eos=True)
    return [llm.generate("0101010101", params, mode=mode)[0].token_ids for mode in llm.modes]


def main(cores: str, path: str, *what: str) -> None:
    """Pins the process before JAX starts, which sizes its thread pools then."""
    if cores == "one":
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    found = {dtype: logits_hashes(path, dtype) for dtype in what if dtype != "texts"}
    print(json.dumps({"logits": found, "texts": texts(path) if "texts" in what else None}))


if __name__ == "__main__":
    main(*sys.argv[1:])
