"""Prints docs/kernels.md's table of products: `taskset -c 0 python docs/figures/products.py`.

Rows are normed and multiplied with one weight after the other, as many as no core's cache holds, by
the packed products and by XLA's; an entry is GFLOP/s, the median of some runs of all weights. With
`--busy`, for one core of a machine that does other work, too, it goes by the least processor time.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.linear import api
from ssd_jax.kernels.linear.kinds import KINDS
from ssd_jax.kernels.rows import Norm
from ssd_jax.system.huge_pages import HugePages

KINDS_SHOWN = ("bfloat16", "xla", "int8", "Q4_1")
SHAPES = ("960x576", "3072x576", "576x1536")
ROWS = (8, 32, 64, 256, 1024)
BYTES = 40_000_000
"""Of all weights of a shape."""


def weights(kind: str, outputs: int, inputs: int) -> list[api.Weight]:
    """Weights of zeros: packed ones of a kind, or XLA's bfloat16."""
    shape = (outputs, 2 * inputs) if kind == "xla" else KINDS[kind].packed_shape(outputs, inputs)
    copy = HugePages().copy
    arrays = [
        jax.device_put(copy(np.zeros(shape, np.uint8)))
        for _ in range(max(1, BYTES // np.prod(shape)))
    ]
    if kind == "xla":
        return [array.view(jnp.bfloat16) for array in arrays]
    return [api.Packed(array, kind, outputs, inputs) for array in arrays]


def program(rows: int, inputs: int, like: Sequence[api.Weight]) -> Callable[[list], jax.Array]:
    """All products, each one's norm after the product before it."""
    x = jnp.ones((rows, inputs))

    def run(arrays: list) -> jax.Array:
        scale = jnp.ones(inputs)
        for array, weight in zip(arrays, like, strict=True):
            if isinstance(weight, api.Packed):
                array = api.Packed(array, weight.kind, weight.outputs, weight.inputs)
            [y] = api.products(x, [array], Norm(scale, 1e-5))
            scale = scale + 0 * y[0, 0]
        return scale

    return jax.jit(run)


def seconds(run: Callable[[list], jax.Array], arrays: list, *, busy: bool) -> float:
    """The median of a run, or the least processor time of one, after one that compiles."""
    times, clock = [], time.process_time if busy else time.perf_counter
    jax.block_until_ready(run(arrays))
    while len(times) < 3 or sum(times) < 0.2:
        start = clock()
        jax.block_until_ready(run(arrays))
        times.append(clock() - start)
    return float(min(times) if busy else np.median(times))


def main() -> None:
    """Prints a line of the table for each kind and shape as it is measured."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--busy", action="store_true")
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--kinds", nargs="+", default=KINDS_SHOWN, choices=("xla", *KINDS))
    parser.add_argument("--shapes", nargs="+", default=SHAPES, metavar="OUTPUTSxINPUTS")
    options = parser.parse_args()
    if reason := why_missing():
        sys.exit(f"there are no packed products: {reason}")
    print(f"| weights | shape | {' | '.join(f'{rows:,}' for rows in options.rows)} |")
    print(f"|---|---|{'---|' * len(options.rows)}")
    for kind in options.kinds:
        for outputs, inputs in (map(int, shape.split("x")) for shape in options.shapes):
            like = weights(kind, outputs, inputs)
            arrays = [one.panels if isinstance(one, api.Packed) else one for one in like]
            cells = []
            for rows in options.rows:
                run = program(rows, inputs, like)
                taken = seconds(run, arrays, busy=options.busy) / len(like)
                cells.append(f"{2 * rows * outputs * inputs / taken / 1e9:,.0f}")
            print(f"| {kind} | {outputs} x {inputs} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
