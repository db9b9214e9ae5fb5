"""Milliseconds of llama.cpp's forward of a few tokens after some others, the median.

    LLAMA_PYTHON tests/oracle/bench_widths.py MODEL.gguf --widths 1 2 4 8 --threads 2

It computes the logits of all of them, as a verification does. Beside it, of this package:
`ssd-jax bench --suite=step --mode=ar --dtype=native --target=MODEL.gguf --widths=1,2,4,8`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path

import llama_cpp

BEFORE = 64  # positions


def milliseconds(llama: llama_cpp.Llama, width: int, repeats: int) -> float:
    tokens, taken = list(range(100, 100 + width)), []
    for _ in range(repeats + 1):
        llama.n_tokens = BEFORE  # `eval` drops what lies behind
        start = time.perf_counter()
        llama.eval(tokens)
        taken.append(time.perf_counter() - start)
    return 1e3 * statistics.median(taken[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--widths", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=30)
    args = parser.parse_args()
    llama = llama_cpp.Llama(
        str(args.model),
        n_ctx=1024,
        n_threads=args.threads,
        n_threads_batch=args.threads,
        logits_all=True,
        verbose=False,
    )
    llama.eval(list(range(100, 100 + BEFORE)))
    for width in args.widths:
        print(f"{width}: {milliseconds(llama, width, args.repeats):.2f} ms", flush=True)


if __name__ == "__main__":
    main()
