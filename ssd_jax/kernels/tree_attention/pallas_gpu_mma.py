"""The Mosaic GPU kernel of `pallas_gpu.py` for any GPU from Ampere on: softmaxes over parts of a
sequence.

It has only what every GPU from Ampere on has: products of a warp (`mma.sync`), and plain loads. A
block of the grid is (tile of queries, part and sequence, key/value head) and has one warpgroup,
which goes over the part block by block. While it computes with a block in shared memory, the next
one is on its way to registers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ssd_jax.kernels.tree_attention.pallas_gpu_part import (
    ROWS,
    SUMS,
    Operands,
    Ref,
    Results,
    SequencePart,
    SoftmaxSoFar,
    Tile,
    Visible,
    load,
    masked,
    nothing,
    scaled,
    swizzled,
    weigh,
)

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3")
NEEDS = "8.0 to 10.3 (A100 to B200)"
"""Compute capability of GPUs for which JAX compiles it."""
BLOCK = 4096
"""Numbers of the keys of a block: what a warp takes as one operand fills half of its registers."""
TILES = 1
"""Tiles of queries that share a block's keys and values."""
PER_CORE = 2
"""Blocks of the grid that a core runs at a time: two have its registers."""
_PLGPU: Any = plgpu  # has no mma before JAX 0.11


def threads(tiles: int) -> int:
    """Warpgroups of a block of the grid."""
    return tiles


def scratch(tiles: int, block: int, head_dim: int, dtype: Any, interpret: Any) -> list[Any]:
    """The kernel's shared memory."""
    del tiles, interpret
    return [
        plgpu.SMEM(shape, dtype=dtype, transforms=swizzled(shape[1], dtype))
        for shape in ((block, 2 * head_dim), (ROWS, block))
    ]


def kernel(
    operands: Operands,
    results: Results,
    kv_shared: Ref,
    weights_shared: Ref,
    *,
    branch_blocks: int,
    M: int,
    interpret: bool,
) -> None:
    """One block of the grid.

    Args:
      kv_shared, weights_shared: [block, 2 * D], [ROWS, block].
      branch_blocks, M: see `SequencePart`.
      interpret: whether JAX interprets the kernel; it has no `mma`.
    """
    block, head_dim = kv_shared.shape[0], kv_shared.shape[1] // 2
    dtype = kv_shared.dtype
    left, right = (of(dtype) for of in (_PLGPU.Layout.MMA_LHS, _PLGPU.Layout.MMA_RHS))
    copied = plgpu.Layout.SMEM_GMEM_COPY(kv_shared.shape, dtype, 128)
    part = SequencePart(operands, results, block=block, branch_blocks=branch_blocks, M=M)
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    q = load(operands.q.at[part.b, part.head, rows], layout=left, optimized=False)
    in_pages, in_branches = part.views(rows)

    def multiply(sums: Tile, a: Tile, b: Tile) -> Tile:
        """sums + a @ b, in float32."""
        if interpret:
            return sums + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return _PLGPU.mma(sums, a, b)

    def fetch(source: Ref) -> Tile:
        return load(source, layout=copied, optimized=False)

    def add_block(
        index: jax.Array,
        carry: tuple[SoftmaxSoFar, Tile],
        *,
        blocks: Callable[[jax.Array], Ref],
        end: jax.Array,
        visible: Visible | None,
        clean: bool = False,
    ) -> tuple[SoftmaxSoFar, Tile]:
        """Adds the fetched block, and fetches the one behind it: of `blocks`, before `end`."""
        found, kv = carry
        if clean:  # what no query sees may be NaN, which a weight of 0 would keep
            # (Not as an operand: JAX numbers the rows of a right operand's layout wrongly.)
            row = plgpu.broadcasted_iota(jnp.int32, kv.shape, 0, layout=copied)
            kv = jnp.where(row < part.inside(index), kv, jnp.zeros_like(kv))
        kv_shared[...] = kv  # a store waits for all warps, before and after
        kv = fetch(blocks(jnp.minimum(index + 1, end - 1)))
        keys = load(kv_shared.at[:, pl.ds(0, head_dim)].transpose((1, 0)), layout=right)
        none = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), SUMS)
        scores = masked(multiply(none, q, keys), visible, index)
        weights, most, kept = weigh(scores, found.highest)
        weights_shared[...] = weights.astype(dtype)
        values = load(kv_shared.at[:, pl.ds(head_dim, head_dim)], layout=right)
        output = multiply(scaled(found.output, kept), load(weights_shared, layout=left), values)
        return SoftmaxSoFar(most, found.total * kept + weights.sum(axis=1), output), kv

    def add_branches(found: SoftmaxSoFar) -> SoftmaxSoFar:
        add = partial(add_block, blocks=part.of_branches, end=part.count, visible=in_branches)
        first = fetch(part.of_branches(part.in_pages))
        return lax.fori_loop(part.in_pages, part.count, add, (found, first))[0]

    found = nothing(head_dim), fetch(part.of_pages(0))
    add = partial(add_block, blocks=part.of_pages, end=jnp.maximum(part.in_pages, 1))
    found = lax.fori_loop(0, part.plain, partial(add, visible=None), found)
    partly = partial(add, visible=in_pages, clean=True)
    found, _ = lax.fori_loop(part.plain, part.in_pages, partly, found)
    if branch_blocks:
        there = part.count > part.in_pages
        found = lax.cond(there, add_branches, lambda found: found, found)
    part.store(rows, found)
