"""The Mosaic GPU kernel of `pallas_gpu.py`: softmaxes over parts of a sequence's keys and values.

A block of the grid is (group of tiles of queries, part and sequence, key/value head). The parts are
those of the pages and, after them, the sequence's branches. Each tile has its own warpgroup. All
warpgroups go over the part's positions, block by block, while the first one has the next blocks
copied into a ring of slots that all of them read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64
"""Queries a tile: the fewest rows of a Hopper product."""
SLOTS = 4
"""Blocks of keys and values in shared memory."""
LOWEST = -1e30
MASKED = 2 * LOWEST
"""A score whose weight is 0 whatever the maximum."""
LOG2_E = math.log2(math.e)
Ref = Any
"""Ref of an array in one of a GPU's memories."""

_load: Any = plgpu.load  # its signature differs before JAX 0.12
_Sums: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)
_AHEAD = SLOTS - 2  # blocks being copied; a warpgroup may be a block behind the first


def kernel(
    table: Ref,
    length: Ref,
    whole: Ref,
    q: Ref,
    seen: Ref,
    own: Ref,
    pages: Ref,
    branches: Ref,
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
    free: Ref,
    cleaned: Ref,
    *,
    parts: int,
    M: int,
) -> None:
    """One block of the grid.

    Args:
      table: [B, P] int32.
      length, whole: [B] int32: positions that some query of a sequence sees, and that all see.
      q: [B, kv_heads, Q, D], Q a multiple of the tiles of a block of the grid, already scaled.
      seen: [B, Q] int32: positions that each query sees.
      own: [2, B, Q] int32: the branch of each query, and the last depth of it that it sees.
      pages: [pages, kv_heads, page_size, 2 * D].
      branches: [B, kv_heads, E, 2 * D], E a multiple of the positions of a block; entry e is in
        branch e % M, at depth e // M. Entries that no query sees are finite.
      maximum, total: [parts or one more, B, kv_heads, Q] float32, of powers of two.
      output: [parts or one more, B, kv_heads, Q, D] float32, not normalised.
      q_shared, k_shared, v_shared, weights_shared: [tiles, ROWS, D], [SLOTS, block, D] twice,
        [tiles, ROWS, block].
      q_here, k_here, v_here: barriers of the copies to the first three.
      free: barriers: all have read a slot.
      cleaned: barrier: unseen values in the last block are cleaned.
      parts: number of parts that a prefix is cut into.
      M: branches of a sequence.
    """
    thread, head = lax.axis_index("thread"), lax.axis_index("head")
    states, place = maximum.shape[0], lax.axis_index("part")  # of a sequence
    part, b = lax.rem(place, states), lax.div(place, states)
    tiles, _, head_dim = q_shared.shape
    block = k_shared.shape[1]
    rows = pl.ds((lax.axis_index("tile") * tiles + thread) * ROWS, ROWS)
    plgpu.copy_gmem_to_smem(q.at[b, head, rows], q_shared.at[thread], q_here.at[thread])

    def copy(source: Ref, slot: jax.Array) -> None:
        """Copies keys and values that lie side by side, [block, 2 * D]."""
        k, v = source.at[:, pl.ds(0, head_dim)], source.at[:, pl.ds(head_dim, head_dim)]
        plgpu.copy_gmem_to_smem(k, k_shared.at[slot], k_here.at[slot])
        plgpu.copy_gmem_to_smem(v, v_shared.at[slot], v_here.at[slot])

    def reduce(
        count: jax.Array | int,
        plain: jax.Array | int,
        fetch: Callable[[jax.Array], Ref],
        visible: Callable[[jax.Array, jax.Array], jax.Array],
        clean: Callable[[jax.Array, jax.Array], None],
    ) -> None:
        """Reduces `count` blocks.

        Args:
          plain: number of first blocks in which all queries see every position.
          fetch: returns a block [block, 2 * D] by its number.
          visible: returns the mask [ROWS, block] of a block, given its number and the columns.
          clean: makes a block's values finite, given its number and slot.
        """

        @pl.when(thread == 0)
        def _():
            for index in map(jnp.int32, range(_AHEAD)):
                pl.when(index < count)(partial(lambda i: copy(fetch(i), i), index))

        plgpu.barrier_wait(q_here.at[thread])

        def add_block(index: jax.Array, carry: Any, *, masked: bool = True) -> Any:
            highest, sums, added = carry
            slot, later = lax.rem(index, SLOTS), index + _AHEAD

            @pl.when((thread == 0) & (later < count))
            def _():
                there = lax.rem(later, SLOTS)
                pl.when(later >= SLOTS)(lambda: plgpu.barrier_wait(free.at[there]))
                copy(fetch(later), there)

            plgpu.barrier_wait(k_here.at[slot])
            q_tile, w_tile = q_shared.at[thread], weights_shared.at[thread]
            scores = _product(q_tile, k_shared.at[slot].transpose((1, 0)), (ROWS, block))
            if masked:
                layout = plgpu.Layout.WGMMA
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=layout)
                scores = jnp.where(visible(index, column), scores, MASKED)
            most = jnp.maximum(highest, scores.max(axis=1) * LOG2_E)
            kept = jnp.exp2(highest - most)
            weights = jnp.exp2(scores * LOG2_E - lax.broadcast_in_dim(most, scores.shape, [0]))
            w_tile[...] = weights.astype(pages.dtype)  # JAX interprets no operand in registers
            plgpu.commit_smem()
            plgpu.barrier_wait(v_here.at[slot])
            if masked:
                clean(index, slot)
            added = added * lax.broadcast_in_dim(kept, added.shape, [0])
            added = added + _product(w_tile, v_shared.at[slot], (ROWS, head_dim))
            pl.when(index + SLOTS < count)(lambda: plgpu.barrier_arrive(free.at[slot]))
            return most, sums * kept + weights.sum(axis=1), added

        start = (
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        found = lax.fori_loop(0, plain, partial(add_block, masked=False), start)
        highest, sums, added = lax.fori_loop(plain, count, add_block, found)
        maximum[part, b, head, rows] = highest
        total[part, b, head, rows] = sums
        output[part, b, head, rows] = added

    @pl.when(part < parts)
    def _():
        limit = length[b]

        def of_part(blocks: jax.Array) -> jax.Array:
            """Number of the first `blocks` blocks in this part. They are dealt out in turn, so that
            neither they nor a query's bits depend on other sequences' lengths."""
            return lax.div(jnp.maximum(blocks - part + (parts - 1), 0), parts)

        reach = _load(seen.at[b, rows], layout=_BY_ROW, optimized=False)

        def fetch(index: jax.Array) -> Ref:
            at = (part + index * parts) * block
            page = table[b, lax.div(at, pages.shape[2])]
            within = pl.ds(pl.multiple_of(lax.rem(at, pages.shape[2]), block), block)
            return pages.at[page, head, within]

        def visible(index: jax.Array, column: jax.Array) -> jax.Array:
            behind = reach - (part + index * parts) * block
            return column < lax.broadcast_in_dim(behind, column.shape, [0])

        def clean(index: jax.Array, slot: jax.Array) -> None:
            """Zeroes values that no query sees: they may be NaN, which a weight of 0 would keep."""
            inside = limit - (part + index * parts) * block

            @pl.when(inside < block)
            def _():
                @pl.when(thread == 0)
                def _():
                    v = _load(v_shared.at[slot], layout=plgpu.Layout.WGMMA)
                    row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=plgpu.Layout.WGMMA)
                    v_shared[slot] = jnp.where(row < inside, v, jnp.zeros_like(v))
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(cleaned)

                plgpu.barrier_wait(cleaned)

        count = of_part(lax.div(limit + (block - 1), block))
        reduce(count, of_part(lax.div(whole[b], block)), fetch, visible, clean)

    if states > parts:

        @pl.when(part == parts)
        def _():
            branch, depth = (
                _load(own.at[which, b, rows], layout=_BY_ROW, optimized=False) for which in (0, 1)
            )

            def visible(index: jax.Array, column: jax.Array) -> jax.Array:
                entry = column + index * block
                its_branch, its_depth = lax.rem(entry, M), lax.div(entry, M)
                its = its_branch == lax.broadcast_in_dim(branch, column.shape, [0])
                return its & (its_depth <= lax.broadcast_in_dim(depth, column.shape, [0]))

            reduce(
                branches.shape[2] // block,
                0,
                lambda index: branches.at[b, head, pl.ds(index * block, block)],
                visible,
                lambda _index, _slot: None,
            )


def _product(a: Any, b: Ref, shape: tuple[int, int]) -> jax.Array:
    """a @ b, in float32."""

    def multiply(sums: Ref) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, _Sums(shape, jnp.float32))
