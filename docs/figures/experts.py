"""`python docs/figures/experts.py DIRECTORY`: forwards of a model with experts on a processor.

Milliseconds of a forward of 1 to 8 tokens, each another one, by packed products and by XLA's;
medians of calls in turn, and of the ratios of pairs. DIRECTORY is a checkpoint, such as one of
`docs/figures/synthetic.py`.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import BLOCK, Contiguous
from ssd_jax.models.execution import Execution
from ssd_jax.models.functional import FunctionalModel

TOKENS = (1, 2, 4, 8)
ROUNDS = 15


def forwards(directory: str, dtype: str, linear: str) -> dict[int, Callable[[], jax.Array]]:
    """A forward for each number of tokens."""
    checkpoint = open_checkpoint(directory)
    config = checkpoint.config.for_context(BLOCK)
    model = FunctionalModel(config, Execution.for_platform("cpu", dtype, linear=linear))
    parameters = load_parameters(checkpoint.tensors, model, where=directory)
    pages = model.new_pages(1, BLOCK)

    def forward(parameters: list[jax.Array], tokens: jax.Array) -> jax.Array:
        module = model.module(parameters)
        positions = jnp.arange(tokens.shape[1])[None]
        hidden, _, _ = module.hidden(tokens, positions, positions + 1, pages, Contiguous())
        return module.logits(hidden.reshape(tokens.size, -1))

    program = jax.jit(forward)
    ids = np.random.default_rng(0).permutation(config.vocab_size).astype(np.int32)
    return {count: lambda count=count: program(parameters, ids[None, :count]) for count in TOKENS}


def milliseconds(run: Callable[[], jax.Array]) -> float:
    """Of one call."""
    start = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - start)


def main() -> None:
    """See the module."""
    if reason := why_missing():
        sys.exit(f"there are no packed products: {reason}")
    print("| weights | tokens | packed, ms | XLA, ms | XLA / packed | / 1 token |")
    print("|---|---|---|---|---|---|")
    for dtype in ("bfloat16", "int8"):
        packed, unpacked = (forwards(sys.argv[1], dtype, linear) for linear in ("cpu", "xla"))
        single = None
        for count in TOKENS:
            runs = packed[count], unpacked[count]
            for run in runs:
                jax.block_until_ready(run())
            times = [[milliseconds(run) for run in runs] for _ in range(ROUNDS)]
            packed, xla = (statistics.median(column) for column in zip(*times, strict=True))
            ratio = statistics.median(of_xla / of_packed for of_packed, of_xla in times)
            single = single or packed
            print(
                f"| {dtype} | {count} | {packed:.1f} | {xla:.1f} | {ratio:.2f}x "
                f"| {packed / single:.2f}x |",
                flush=True,
            )


if __name__ == "__main__":
    main()
