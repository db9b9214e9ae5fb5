"""The Mosaic GPU kernel of `pallas_gpu.py`: a softmax over a part of a sequence's pages.

A block of the grid is (tile of queries, part of the prefix and sequence, key/value head), and one
group of four warps. It goes once over its positions, block by block; meanwhile the next block is
copied into the other of two slots.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Queries of a tile: the least that a product of Hopper's has."""
LOWEST = -1e30
Ref = Any
"""Of an array in one of a GPU's memories."""

_load: Any = plgpu.load  # another signature before JAX 0.12
_Sums: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


def kernel(
    table: Ref,
    length: Ref,
    q: Ref,
    seen: Ref,
    pages: Ref,
    maximum: Ref,
    total: Ref,
    output: Ref,
    q_shared: Ref,
    k_shared: Ref,
    v_shared: Ref,
    weights_shared: Ref,
    q_here: Ref,
    k_here: Ref,
    v_here: Ref,
    *,
    parts: int,
) -> None:
    """One block of the grid.

    Args:
      table: [B, P] int32.
      length: [B] int32: positions that some query of a sequence sees.
      q: [B, kv_heads, Q, D], Q a multiple of `ROWS`, already scaled.
      seen: [B, Q] int32: positions that each query sees.
      pages: [pages, kv_heads, page_size, 2 * D].
      maximum, total: [parts, B, kv_heads, Q] float32.
      output: [parts, B, kv_heads, Q, D] float32, not normalised.
      q_shared, k_shared, v_shared, weights_shared: [ROWS, D], [2, block, D] twice, [ROWS, block].
      q_here, k_here, v_here: barriers of the copies to the first three.
      parts: that a prefix is cut into.
    """
    tile, head = lax.axis_index("tile"), lax.axis_index("head")
    part, b = lax.rem(lax.axis_index("part"), parts), lax.div(lax.axis_index("part"), parts)
    _, block, head_dim = k_shared.shape
    rows = pl.ds(tile * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[b, head, rows], q_shared, q_here)
    limit = length[b]
    blocks = lax.div(limit + (block - 1), block)
    each = lax.div(blocks + (parts - 1), parts)
    begin = jnp.minimum(part * each, blocks)
    end = jnp.minimum(begin + each, blocks)

    def fetch(index: jax.Array, slot: jax.Array) -> None:
        at = index * block
        page = table[b, lax.div(at, pages.shape[2])]
        within = pl.ds(pl.multiple_of(lax.rem(at, pages.shape[2]), block), block)
        k = pages.at[page, head, within, pl.ds(0, head_dim)]
        v = pages.at[page, head, within, pl.ds(head_dim, head_dim)]
        plgpu.copy_gmem_to_smem(k, k_shared.at[slot], k_here.at[slot])
        plgpu.copy_gmem_to_smem(v, v_shared.at[slot], v_here.at[slot])

    @pl.when(begin < end)
    def _():
        fetch(begin, lax.rem(begin, 2))

    plgpu.barrier_wait(q_here)
    visible = _load(seen.at[b, rows], layout=_BY_ROW, optimized=False)

    def add_block(index: jax.Array, carry: Any) -> Any:
        highest, sums, added = carry
        slot = lax.rem(index, 2)

        @pl.when(index + 1 < end)
        def _():
            fetch(index + 1, 1 - slot)

        plgpu.barrier_wait(k_here.at[slot])
        scores = _product(q_shared, k_shared.at[slot].transpose((1, 0)), (ROWS, block))
        column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=plgpu.Layout.WGMMA)
        mask = column + index * block < lax.broadcast_in_dim(visible, scores.shape, [0])
        scores = jnp.where(mask, scores, LOWEST)
        most = jnp.maximum(highest, scores.max(axis=1))
        kept = jnp.exp(highest - most)
        weights = jnp.exp(scores - lax.broadcast_in_dim(most, scores.shape, [0]))
        weights = jnp.where(mask, weights, 0.0)
        plgpu.barrier_wait(v_here.at[slot])

        @pl.when((index + 1) * block > limit)
        def _():  # what no query sees may be NaN, which a weight of 0 would not take away
            v = _load(v_shared.at[slot], layout=plgpu.Layout.WGMMA)
            row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
            v_shared[slot] = jnp.where(row + index * block < limit, v, jnp.zeros_like(v))

        weights_shared[...] = weights.astype(pages.dtype)  # JAX interprets no operand in registers
        plgpu.commit_smem()
        product = _product(weights_shared, v_shared.at[slot], (ROWS, head_dim))
        added = added * lax.broadcast_in_dim(kept, added.shape, [0]) + product
        return most, sums * kept + weights.sum(axis=1), added

    start = (
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), _BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
    )
    highest, sums, added = lax.fori_loop(begin, end, add_block, start)
    maximum[part, b, head, rows] = highest
    total[part, b, head, rows] = sums
    output[part, b, head, rows] = added


def _product(a: Any, b: Ref, shape: tuple[int, int]) -> jax.Array:
    """a @ b in float32."""

    def multiply(sums: Ref) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, _Sums(shape, jnp.float32))
