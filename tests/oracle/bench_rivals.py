"""Decode speed of this package beside llama.cpp, or transformers on CPU torch.

One engine, in the environment that has it (which the README beside this file says how to make):

    python tests/oracle/bench_rivals.py --engine llama.cpp \
        --model M.gguf --prompts P.jsonl --max-tokens 48 --json out.jsonl

Two, each in its own environment, alternating prompt by prompt (A B, B A, A B, ...) on the same
cores; the engine whose turn it is not sits blocked on its standard input:

    python tests/oracle/bench_rivals.py --pair LLAMA_PYTHON SSD_JAX_PYTHON \
        --engines llama.cpp ssd_jax --model M.gguf --prompts P.jsonl --max-tokens 48

A prompt file has one {"ids": ...}, {"prompt": ...} or {"messages": [...]} a line; `prompt_ids.py`
makes one. Batch 1, greedy, past any end-of-sequence token, as many threads as cores. Tokens/s are
of decoding alone; `--json` has one line a run, with the seconds to the first token and of the
others, and the medians in the last line.

An engine is a name, and what drafts for it: `llama.cpp` and `ssd_jax` decode alone, with
`:lookup` they propose what followed the same words before, with `:draft` a draft model (--draft)
proposes. llama.cpp computes with the quantised weights of the file, the others with --dtype.
transformers has four loops, whose names and figures are in the README, too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_engines import ENGINES, Engine, Workload, open_engine
from bench_worker import Worker, serve, undisturbed_run

BOOTSTRAP_SAMPLES = 10_000
SETTINGS = ("model", "draft", "k", "prompts", "max_tokens", "dtype", "cores", "repeats")


def measure_pair(a: Worker, b: Worker, prompts: int, repeats: int, tries: int) -> dict[str, Any]:
    """Runs every prompt on both, alternating who goes first.

    Returns:
      Everything run, medians, the ratio B/A per prompt (of medians over repeats), and the median
      ratio with a 95% bootstrap interval over prompts.
    """
    runs = {worker: [[] for _ in range(prompts)] for worker in (a, b)}
    for repeat in range(repeats):
        for index in range(prompts):
            order = (a, b) if (index + repeat) % 2 == 0 else (b, a)
            for worker, other in (order, order[::-1]):
                runs[worker][index].append(undisturbed_run(worker, (other,), index, tries))
    speeds_a, speeds_b = (_speed_of_prompts(runs[worker]) for worker in (a, b))
    ratios = [y / x for x, y in zip(speeds_a, speeds_b, strict=True)]
    return {
        "a": _summary(a, runs[a]),
        "b": _summary(b, runs[b]),
        "ratio_per_prompt": ratios,
        "ratio_median": statistics.median(ratios),
        "ratio_interval_95": bootstrap_interval(ratios),
        "equal_leading_tokens": [
            _common_prefix(x[0]["token_ids"], y[0]["token_ids"])
            for x, y in zip(runs[a], runs[b], strict=True)
        ],
    }


def measure_alone(worker: Worker, prompts: int, repeats: int, tries: int) -> dict[str, Any]:
    """Runs every prompt on one engine, `repeats` times over all of them."""
    runs: list[list[dict[str, Any]]] = [[] for _ in range(prompts)]
    for _ in range(repeats):
        for index in range(prompts):
            runs[index].append(undisturbed_run(worker, (), index, tries))
    return _summary(worker, runs)


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile interval of the median under resampling of `values`."""
    rng = np.random.default_rng(0)
    samples = rng.choice(np.asarray(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _speed_of_prompts(runs: Sequence[Sequence[dict[str, Any]]]) -> list[float]:
    return [statistics.median(run["tokens_per_second"] for run in same) for same in runs]


def _summary(worker: Worker, runs: Sequence[Sequence[dict[str, Any]]]) -> dict[str, Any]:
    speeds = _speed_of_prompts(runs)
    flat = [run for same in runs for run in same]
    return {
        "engine": worker.engine,
        **worker.about,
        "tokens_per_second_median": statistics.median(speeds),
        "tokens_per_second_interval_95": bootstrap_interval(speeds),
        "first_token_seconds_median": statistics.median(run["first_token_seconds"] for run in flat),
        "most_idle_cpu": max(run["idle_cpu"] for run in flat),
        "most_foreign_cpu": max(run["foreign_cpu"] for run in flat),
        "discarded_runs": sum(run["discarded"] for run in flat),
        "runs": runs,
    }


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _print_summary(summary: dict[str, Any]) -> None:
    low, high = summary["tokens_per_second_interval_95"]
    print(
        f"{summary['engine']}: {summary['tokens_per_second_median']:.1f} tokens/s "
        f"(95% interval {low:.1f} to {high:.1f}), first token after "
        f"{summary['first_token_seconds_median']:.2f} s; while it ran, others used at most "
        f"{summary['most_foreign_cpu']:.2f} cores and the idle engine "
        f"{summary['most_idle_cpu']:.2f}; {summary['discarded_runs']} disturbed runs discarded"
    )


def _print_pair(result: dict[str, Any]) -> None:
    _print_summary(result["a"])
    _print_summary(result["b"])
    low, high = result["ratio_interval_95"]
    print("B/A per prompt:", " ".join(f"{ratio:.2f}" for ratio in result["ratio_per_prompt"]))
    print(f"B/A median {result['ratio_median']:.3f}, 95% interval {low:.3f} to {high:.3f}")
    print("equal leading tokens per prompt:", *result["equal_leading_tokens"])


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, help="measure this one, in this python")
    parser.add_argument("--pair", nargs=2, metavar=("PY_A", "PY_B"), help="the two pythons")
    parser.add_argument(
        "--engines",
        nargs=2,
        choices=ENGINES,
        default=("transformers:eager", "ssd_jax"),
        metavar=("A", "B"),
        help=f"what the two run, of {', '.join(ENGINES)} (default: %(default)s)",
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or model directory")
    parser.add_argument(
        "--draft", type=Path, help="GGUF file of the draft (default: that of ssd_jax)"
    )
    parser.add_argument("--k", type=int, default=4, help="tokens a draft proposes (%(default)s)")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="times over all prompts")
    parser.add_argument(
        "--tries", type=int, default=6, help="runs until one is undisturbed (default: %(default)s)"
    )
    parser.add_argument("--dtype", default="bfloat16", help="(default: %(default)s)")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--cores", default=cores, help="run on these (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="also write every run here, as JSON lines")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.engine) == bool(args.pair):
        parser.error("give either --engine or --pair")
    chosen = [args.engine] if args.engine else args.engines
    if "llama.cpp:draft" in chosen and args.draft is None:
        parser.error("llama.cpp:draft needs a draft model; give --draft FILE.gguf")
    if args.max_tokens < 2:
        parser.error(f"--max-tokens {args.max_tokens}: speed between tokens needs at least 2")
    return args


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.strip()]


def _open_warm(args: argparse.Namespace) -> tuple[Engine, dict[str, Any]]:
    """Loads the engine on its cores (before any thread pool starts) and runs one prompt."""
    cores = {int(core) for core in args.cores.split(",")}
    os.sched_setaffinity(0, cores)
    workload = Workload(
        model=args.model.resolve(),
        prompts=_read_prompts(args.prompts),
        max_tokens=args.max_tokens,
        dtype=args.dtype,
        threads=len(cores),
        draft=args.draft and args.draft.resolve(),
        k=args.k,
    )
    start = time.perf_counter()
    engine = open_engine(args.engine, workload)
    loaded = time.perf_counter()
    engine.generate(0)
    return engine, {
        "versions": engine.versions(),
        "load_seconds": round(loaded - start, 1),
        "warm_up_seconds": round(time.perf_counter() - loaded, 1),
    }


def _pair(args: argparse.Namespace) -> dict[str, Any]:
    prompts = len(_read_prompts(args.prompts))
    (python_a, python_b), (engine_a, engine_b) = args.pair, args.engines
    with Worker(python_a, engine_a, args) as a, Worker(python_b, engine_b, args) as b:
        result = measure_pair(a, b, prompts, args.repeats, args.tries)
    _print_pair(result)
    return result


def _alone(args: argparse.Namespace) -> dict[str, Any]:
    prompts = len(_read_prompts(args.prompts))
    with Worker(sys.executable, args.engine, args) as worker:
        result = measure_alone(worker, prompts, args.repeats, args.tries)
    _print_summary(result)
    return result


def main() -> None:
    args = _arguments()
    if args.worker:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not look like an answer
        serve(*_open_warm(args), out)
        return
    result = _pair(args) if args.pair else _alone(args)
    if args.json:
        args.json.write_text("".join(_json_lines(args, result)), encoding="utf-8")


def _json_lines(args: argparse.Namespace, result: dict[str, Any]) -> Iterator[str]:
    """Every run, then what they come to."""
    settings = {name: str(getattr(args, name)) for name in SETTINGS}
    for summary in (result["a"], result["b"]) if args.pair else (result,):
        for index, runs in enumerate(summary.pop("runs")):
            for run in runs:
                yield json.dumps({"engine": summary["engine"], "prompt": index} | run) + "\n"
    yield json.dumps(settings | result) + "\n"


if __name__ == "__main__":
    main()
