"""Autoregressive tokens/s of this package against transformers on CPU torch: same cores, same prompts.

One engine, in the environment that has it:

    python tests/oracle/bench_transformers.py --engine transformers:eager \
        --model M.gguf --prompts P.jsonl --max-tokens 64 --json out.json

Both, alternating prompt by prompt (A B, B A, A B, ...), each in its own environment; both pythons
may run this script, and the engine whose turn it is not sits blocked on its standard input:

    python tests/oracle/bench_transformers.py --pair ORACLE_PYTHON SSD_JAX_PYTHON \
        --engines transformers:eager ssd_jax --model M.gguf --prompts P.jsonl --max-tokens 64

A prompt file has one {"prompt": ...} or {"messages": [...]} a line. Prefill is not counted.

Which loop is transformers at its fastest: DOCSTRING_FIGURES
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from bench_engines import ENGINES, Engine, Workload, open_engine

BOOTSTRAP_SAMPLES = 10_000


class Worker:
    """An engine in another process, loaded and warm, that runs only when told to.

    Raises:
      RuntimeError: the process ended instead of answering (its error is on standard error).
    """

    def __init__(self, python: str, engine: str, args: argparse.Namespace) -> None:
        self.engine = engine
        command = [python, __file__, "--worker", "--engine", engine]
        for name in ("model", "prompts", "max_tokens", "dtype", "cores"):
            command += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.about = self._answer()

    def generate(self, index: int) -> dict[str, Any]:
        stdin = self._process.stdin
        assert stdin is not None
        stdin.write(f"{index}\n")
        stdin.flush()
        return self._answer()

    def cpu_seconds(self) -> float:
        """User and system time of the process so far (Linux only)."""
        stat = Path(f"/proc/{self._process.pid}/stat").read_text(encoding="ascii")
        user, system = stat.rpartition(")")[2].split()[11:13]
        return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")

    def close(self) -> None:
        self._process.communicate()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the {self.engine} worker ended (status {self._process.wait()})")
        return json.loads(line)


def serve(engine: Engine, about: dict[str, Any], out: Any) -> None:
    """Answers prompt indices on standard input, one JSON line each, until it closes."""
    print(json.dumps(about), file=out, flush=True)
    for line in sys.stdin:
        measurement = engine.generate(int(line))
        print(json.dumps(dataclasses.asdict(measurement)), file=out, flush=True)


def compare(a: Worker, b: Worker, prompts: int, repeats: int) -> dict[str, Any]:
    """Runs every prompt on both, alternating who goes first, and summarises.

    Returns:
      Medians, the ratio B/A per prompt (of medians over repeats), its median with a 95% bootstrap
      interval over prompts, and how busy the idle engine was (share of one core).
    """
    runs: dict[Worker, list[list[dict[str, Any]]]] = {
        w: [[] for _ in range(prompts)] for w in (a, b)
    }
    idle_seconds = wall = 0.0
    for turn in range(prompts * repeats):
        index = turn % prompts
        order = (a, b) if (index + turn // prompts) % 2 == 0 else (b, a)
        for worker, idle in (order, order[::-1]):
            start, before = time.perf_counter(), idle.cpu_seconds()
            runs[worker][index].append(worker.generate(index))
            wall += time.perf_counter() - start
            idle_seconds += idle.cpu_seconds() - before
    speeds = {
        worker: [statistics.median(r["tokens_per_second"] for r in of_prompt) for of_prompt in each]
        for worker, each in runs.items()
    }
    ratios = [y / x for x, y in zip(speeds[a], speeds[b], strict=True)]
    return {
        "a": {"engine": a.engine, **a.about, "tokens_per_second": speeds[a]},
        "b": {"engine": b.engine, **b.about, "tokens_per_second": speeds[b]},
        "median_a": statistics.median(speeds[a]),
        "median_b": statistics.median(speeds[b]),
        "ratio_per_prompt": ratios,
        "ratio_median": statistics.median(ratios),
        "ratio_interval_95": bootstrap_interval(ratios),
        "same_leading_tokens": [
            _common_prefix(x[0]["token_ids"], y[0]["token_ids"])
            for x, y in zip(runs[a], runs[b], strict=True)
        ],
        "idle_engine_cpu_share": idle_seconds / wall,
    }


def bootstrap_interval(values: Sequence[float]) -> tuple[float, float]:
    """The 95% percentile interval of the median under resampling of `values`."""
    rng = np.random.default_rng(0)
    samples = rng.choice(np.asarray(values), (BOOTSTRAP_SAMPLES, len(values)))
    low, high = np.percentile(np.median(samples, axis=1), (2.5, 97.5))
    return float(low), float(high)


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), len(a))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engine", choices=ENGINES, help="measure this one alone")
    parser.add_argument("--pair", nargs=2, metavar=("PY_A", "PY_B"), help="the two pythons")
    parser.add_argument(
        "--engines", nargs=2, choices=ENGINES, default=("transformers:eager", "ssd_jax")
    )
    parser.add_argument("--model", type=Path, required=True, help="GGUF file or model directory")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=1, help="times over all prompts")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:2])
    parser.add_argument("--cores", default=cores, help="pin to these (default %(default)s)")
    parser.add_argument("--json", type=Path, help="also write the result here")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if bool(args.engine) == bool(args.pair):
        parser.error("give either --engine or --pair")
    if args.max_tokens < 2:
        parser.error(f"--max-tokens {args.max_tokens}: speed between tokens needs at least 2")
    return args


def _read_prompts(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line]


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
    a, b = (
        Worker(python, name, args) for python, name in zip(args.pair, args.engines, strict=True)
    )
    try:
        result = compare(a, b, len(_read_prompts(args.prompts)), args.repeats)
    finally:
        a.close()
        b.close()
    low, high = result["ratio_interval_95"]
    print(f"A {a.engine}: {result['median_a']:.1f} tokens/s")
    print(f"B {b.engine}: {result['median_b']:.1f} tokens/s")
    print("B/A per prompt:", " ".join(f"{ratio:.2f}" for ratio in result["ratio_per_prompt"]))
    print(f"B/A median {result['ratio_median']:.3f}, 95% interval {low:.3f} to {high:.3f}")
    print(f"equal leading tokens per prompt: {result['same_leading_tokens']}")
    print(f"idle engine used {result['idle_engine_cpu_share']:.3f} of a core")
    return result


def _alone(args: argparse.Namespace) -> dict[str, Any]:
    engine, about = _open_warm(args)
    runs = [
        engine.generate(index)
        for _ in range(args.repeats)
        for index in range(len(_read_prompts(args.prompts)))
    ]
    speeds = [run.tokens_per_second for run in runs]
    low, high = bootstrap_interval(speeds)
    print(
        f"{args.engine}: median {statistics.median(speeds):.1f} tokens/s "
        f"(95% interval {low:.1f} to {high:.1f}, {len(speeds)} runs)"
    )
    return {"engine": args.engine, **about, "runs": [dataclasses.asdict(run) for run in runs]}


def main() -> None:
    args = _arguments()
    if args.worker:
        out = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)  # whatever a library prints must not look like an answer
        serve(*_open_warm(args), out)
        return
    result = _pair(args) if args.pair else _alone(args)
    if args.json:
        settings = {k: str(getattr(args, k)) for k in ("max_tokens", "dtype", "cores", "repeats")}
        settings["model"] = args.model.name
        args.json.write_text(json.dumps(settings | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
