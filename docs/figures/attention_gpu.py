"""`python docs/figures/attention_gpu.py`: attention of 24 branches over one prefix, on a GPU.

Microseconds of a call and the share of the device's copy bandwidth at which the prefix is read,
with shapes of one layer of Llama-3.2-1B and of one of eight devices of Llama-3.1-70B. Each program
makes many calls over different pages, so that no cache has them (XLA's makes one). Where PyTorch is
installed, its `scaled_dot_product_attention` (key/value heads shared through `enable_gqa`, or
queries of a head as rows) and its FlexAttention attend with the same mask over keys and values side
by side, in CUDA graphs of as many calls.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from ssd_jax.kernels.kv_pages import Scratch, chain_path
from ssd_jax.kernels.tree_attention.api import GPU_BACKENDS, tree_attention, why_not
from ssd_jax.system.environment import describe, headline
from ssd_jax.tools.bench.bandwidth import measure_bandwidth

BRANCHES, DEPTHS, PAGE = 24, 4, 256
FLOOR = 256 << 20
"""Bytes of pages that a program reads at least: four times an H200's cache."""
REPEATS, IN_FLIGHT = 10, 25
"""Turns, and runs of a program in one: launches of all but the first are hidden."""
BACKENDS = (*GPU_BACKENDS, "xla_static")


class Shape(NamedTuple):
    """Of one layer's attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    prefix: int

    @property
    def nbytes(self) -> int:
        """Of keys and values of the prefixes."""
        return self.batch * self.prefix * self.kv_heads * 2 * self.head_dim * 2

    @property
    def calls(self) -> int:
        """That one program makes."""
        return max(8, -(-FLOOR // self.nbytes))


SHAPES = [
    Shape(name, heads, kv_heads, head_dim, batch, prefix)
    for name, heads, kv_heads, head_dim in (("Llama-1B", 32, 8, 64), ("70B/8", 8, 1, 128))
    for batch, prefix in ((1, 8192), (1, 32768), (8, 8192))
]
Numbers = dict[str, np.ndarray]


def numbers(shape: Shape) -> Numbers:
    """Random queries, branch tokens and one prefix; see `tree_attention`."""
    rng = np.random.default_rng(0)

    def normal(*sizes: int) -> np.ndarray:
        return rng.standard_normal(sizes).astype(jnp.bfloat16)

    b, h, d = shape.batch, shape.kv_heads, shape.head_dim
    return {
        "q": normal(b, BRANCHES, shape.heads, d),
        "prefix": normal(b, h, shape.prefix, 2 * d),
        "branches": normal(b, h, DEPTHS, BRANCHES, 2 * d),
    }


class Program(NamedTuple):
    """So many calls, run again and again, and what one gives: [B, branches, heads, head_dim]."""

    run: Callable[[int], None]
    calls: int
    once: np.ndarray


def ours(shape: Shape, given: Numbers, backend: str) -> Program:
    """Calls of `tree_attention`."""
    per_row = shape.prefix // PAGE
    count = shape.batch * per_row
    order = np.random.default_rng(1).permutation(count).astype(np.int32)
    pages = given["prefix"].reshape(shape.batch, shape.kv_heads, per_row, PAGE, -1)
    pages = pages.transpose(0, 2, 1, 3, 4).reshape(count, shape.kv_heads, PAGE, -1)
    stored = np.empty_like(pages)
    stored[order] = pages
    table = jnp.asarray(order.reshape(shape.batch, per_row))
    visible = jnp.full((shape.batch, BRANCHES), shape.prefix, jnp.int32)
    branch = jnp.arange(BRANCHES, dtype=jnp.int32)
    paths = jnp.stack([branch, chain_path(jnp.full_like(branch, DEPTHS))], axis=-1)
    paths = jnp.broadcast_to(paths, (shape.batch, BRANCHES, 2))
    q, branches = jnp.asarray(given["q"]), jnp.asarray(given["branches"])

    @jax.jit  # which is lowered once, whatever number of calls there is
    def attend(q: jax.Array, pages: jax.Array) -> jax.Array:
        scratch = Scratch(branches, paths)
        return tree_attention(q, pages, table, visible, scratch, backend=backend)

    @functools.partial(jax.jit, donate_argnums=0)  # so that a CUDA graph finds the same addresses
    def many(q: jax.Array, stocks: list[jax.Array]) -> jax.Array:
        for pages in stocks:  # each call needs the one before
            q = (q + 1e-9 * attend(q, pages)).astype(q.dtype)
        return q

    first = jnp.asarray(stored)
    once = np.asarray(attend(q, first), np.float32)
    calls = shape.calls if backend in GPU_BACKENDS else 1  # XLA's loops take long to compile
    stocks = [jnp.copy(first) for _ in range(calls)]

    def run(times: int) -> None:
        nonlocal q
        for _ in range(times):
            q = many(q, stocks)
        jax.block_until_ready(q)

    return Program(run, calls, once)


def of_torch(shape: Shape, given: Numbers) -> Iterator[tuple[str, Program]]:
    """As `ours`, by PyTorch."""
    import torch
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention
    from torch.nn.functional import scaled_dot_product_attention as sdpa

    def tensor(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).cuda()

    group, d = shape.heads // shape.kv_heads, shape.head_dim
    branches = given["branches"].reshape(shape.batch, shape.kv_heads, DEPTHS * BRANCHES, -1)
    kv = tensor(np.concatenate([given["prefix"], branches], axis=2))
    k, v = kv[..., :d].contiguous(), kv[..., d:].contiguous()
    q = tensor(np.ascontiguousarray(given["q"].transpose(0, 2, 1, 3)))
    rows = q.reshape(shape.batch, shape.kv_heads, group * BRANCHES, d)
    at = torch.arange(k.shape[2], device="cuda")
    branch = torch.arange(BRANCHES, device="cuda")[:, None]
    mask = (at < shape.prefix) | ((at - shape.prefix) % BRANCHES == branch)

    def seen(_b: Any, _h: Any, row: Any, at: Any) -> Any:
        return (at < shape.prefix) | ((at - shape.prefix) % BRANCHES == row)

    blocks = create_block_mask(seen, None, None, BRANCHES, k.shape[2], device="cuda")
    flex = torch.compile(flex_attention, dynamic=False)
    wide = mask.repeat(group, 1)
    attends = {
        "SDPA, enable_gqa": lambda k, v: sdpa(q, k, v, attn_mask=mask, enable_gqa=True),
        "SDPA, rows": lambda k, v: sdpa(rows, k, v, attn_mask=wide),
        "FlexAttention": lambda k, v: flex(q, k, v, block_mask=blocks, enable_gqa=True),
    }
    stocks = [(k.clone(), v.clone()) for _ in range(shape.calls)]
    for name, attend in attends.items():
        try:
            once = attend(k, v).reshape(shape.batch, shape.heads, BRANCHES, d)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                for stock in stocks:
                    attend(*stock)
        except Exception as error:  # a backend that has no such kernel says so in its own way
            print(f"{name}: {type(error).__name__}: {str(error)[:200]}", file=sys.stderr)
            continue

        def replay(times: int, graph: Any = graph) -> None:
            for _ in range(times):
                graph.replay()
            torch.cuda.synchronize()

        yield name, Program(replay, shape.calls, once.transpose(1, 2).float().cpu().numpy())


def microseconds(programs: dict[str, Program]) -> dict[str, float]:
    """Of one call of each, medians of turns."""
    times: dict[str, list[float]] = {name: [] for name in programs}
    for turn in range(REPEATS + 2):
        for name, program in programs.items():
            began = time.perf_counter()
            program.run(IN_FLIGHT)
            if turn >= 2:
                times[name].append((time.perf_counter() - began) / program.calls / IN_FLIGHT)
    return {name: 1e6 * statistics.median(time) for name, time in times.items()}


def main() -> None:
    """See the module."""
    device = jax.devices()[0]
    print(headline(describe()))
    copy = measure_bandwidth(device).copy_gb_per_s
    print(f"copy {copy:.0f} GB/s")
    print(f"{'shape':10} {'B':>3} {'prefix':>7} {'':18} {'us':>8} {'of copy':>8} {'error':>8}")
    for shape in SHAPES:
        given = numbers(shape)
        backends = [backend for backend in BACKENDS if why_not(backend, device.platform) is None]
        programs = {backend: ours(shape, given, backend) for backend in backends}
        try:
            programs |= of_torch(shape, given)
        except ImportError as error:
            print(f"PyTorch: {error}", file=sys.stderr)
        for name, taken in microseconds(programs).items():
            share = shape.nbytes / taken / copy / 1e3
            error = np.abs(programs[name].once - programs["xla_static"].once).max()
            print(
                f"{shape.name:10} {shape.batch:3} {shape.prefix:7} {name:18} {taken:8.1f} "
                f"{share:8.0%} {error:8.4f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
