"""The Mosaic GPU kernel of `pallas_gpu.py`: softmaxes over parts of a sequence's keys and values.

A block of the grid is (group of tiles of queries, part and sequence, key/value head). A part is
some blocks of positions; the last one has the sequence's branches, too. Each tile of queries has a
warpgroup, which goes over the part block by block. One more warpgroup copies the blocks into a ring
of slots that all others read.
"""

from __future__ import annotations

import math
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
    q_here: Ref,
    k_here: Ref,
    v_here: Ref,
    free: Ref,
    cleaned: Ref,
    weights_shared: Ref | None = None,
    *,
    branch_blocks: int,
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
      maximum, total: [parts, B, kv_heads, Q] float32, of powers of two.
      output: [parts, B, kv_heads, Q, D] float32, not normalised.
      q_shared, k_shared, v_shared: [tiles, ROWS, D], and [SLOTS, block, D] twice.
      q_here, k_here, v_here: barriers of the copies to these.
      free: barriers: all have read a slot.
      cleaned: barrier: unseen values in the last block are cleaned.
      weights_shared: [tiles, ROWS, block], given if JAX interprets the kernel.
      branch_blocks: number of blocks in `branches`; 0 if there are none.
      M: branches of a sequence.
    """
    head, place = lax.axis_index("head"), lax.axis_index("part")
    parts = maximum.shape[0]  # of a sequence
    part, b = lax.rem(place, parts), lax.div(place, parts)
    block = k_shared.shape[1]

    def of_part(blocks: jax.Array) -> jax.Array:
        """Number of the first `blocks` blocks in this part. They are dealt out in turn, so that
        neither they nor a query's bits depend on other sequences' lengths."""
        return lax.div(jnp.maximum(blocks - part + (parts - 1), 0), parts)

    def start(index: jax.Array) -> jax.Array:
        """Position of the first entry of the part's block."""
        return (part + index * parts) * block

    limit = length[b]
    plain = of_part(lax.div(whole[b], block))  # in which all queries see every position
    in_pages = of_part(lax.div(limit + (block - 1), block))
    count = in_pages + jnp.where(part == parts - 1, branch_blocks, 0)
    tiles, _, head_dim = q_shared.shape
    thread = lax.axis_index("thread")

    def copy_blocks() -> None:
        """Copies the part's blocks, each as soon as its slot is free."""
        _set_registers(tiles, copies=True)

        def fill(index: jax.Array, _: None) -> None:
            slot = lax.rem(index, SLOTS)
            pl.when(index >= SLOTS)(lambda: plgpu.barrier_wait(free.at[slot]))

            def copy(source: Ref) -> None:
                """Copies keys and values, which lie side by side, [block, 2 * D]."""
                k, v = source.at[:, pl.ds(0, head_dim)], source.at[:, pl.ds(head_dim, head_dim)]
                plgpu.copy_gmem_to_smem(k, k_shared.at[slot], k_here.at[slot])
                plgpu.copy_gmem_to_smem(v, v_shared.at[slot], v_here.at[slot])

            @pl.when(index < in_pages)
            def _():
                page = table[b, lax.div(start(index), pages.shape[2])]
                within = pl.multiple_of(lax.rem(start(index), pages.shape[2]), block)
                copy(pages.at[page, head, pl.ds(within, block)])

            if branch_blocks:

                @pl.when(index >= in_pages)
                def _():
                    entry = pl.multiple_of((index - in_pages) * block, block)
                    copy(branches.at[b, head, pl.ds(entry, block)])

        lax.fori_loop(0, count, fill, None)

    def attend() -> None:
        """Reduces the part for a tile of queries."""
        _set_registers(tiles, copies=False)
        rows = pl.ds((lax.axis_index("tile") * tiles + thread) * ROWS, ROWS)
        plgpu.copy_gmem_to_smem(q.at[b, head, rows], q_shared.at[thread], q_here.at[thread])
        reach, branch, depth = (
            _load(values.at[b, rows], layout=_BY_ROW, optimized=False)
            for values in (seen, own.at[0], own.at[1])
        )
        plgpu.barrier_wait(q_here.at[thread])

        def add_block(index: jax.Array, carry: Any, *, visible: Any, clean: bool = False) -> Any:
            highest, sums, added = carry
            slot = lax.rem(index, SLOTS)
            plgpu.barrier_wait(k_here.at[slot])
            keys = k_shared.at[slot].transpose((1, 0))
            scores = _product(q_shared.at[thread], keys, (ROWS, block))
            if visible is not None:
                layout = plgpu.Layout.WGMMA
                column = plgpu.broadcasted_iota(jnp.int32, (ROWS, block), 1, layout=layout)
                scores = jnp.where(visible(index, column), scores, MASKED)
            most = jnp.maximum(highest, scores.max(axis=1) * LOG2_E)
            kept = jnp.exp2(highest - most)
            weights = jnp.exp2(scores * LOG2_E - lax.broadcast_in_dim(most, scores.shape, [0]))
            plgpu.barrier_wait(v_here.at[slot])
            if clean:
                clean_values(index, slot)
            scaled = added * lax.broadcast_in_dim(kept, added.shape, [0])
            values, w = v_shared.at[slot], weights.astype(pages.dtype)
            if weights_shared is None:
                added = pl.run_state(lambda to: plgpu.wgmma(to, w, values))(_Sums.init(scaled))
            else:  # JAX interprets neither an operand in registers nor a sum that goes on
                weights_shared[thread] = w
                plgpu.commit_smem()
                added = scaled + _product(weights_shared.at[thread], values, (ROWS, head_dim))
            pl.when(index + SLOTS < count)(lambda: plgpu.barrier_arrive(free.at[slot]))
            return most, sums * kept + weights.sum(axis=1), added

        def clean_values(index: jax.Array, slot: jax.Array) -> None:
            """Zeroes values that no query sees: they may be NaN, which a weight of 0 would keep."""
            inside = limit - start(index)

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

        def in_prefix(index: jax.Array, column: jax.Array) -> jax.Array:
            behind = reach - start(index)
            return column < lax.broadcast_in_dim(behind, column.shape, [0])

        def in_branch(index: jax.Array, column: jax.Array) -> jax.Array:
            entry = column + (index - in_pages) * block
            its_branch, its_depth = lax.rem(entry, M), lax.div(entry, M)
            its = its_branch == lax.broadcast_in_dim(branch, column.shape, [0])
            return its & (its_depth <= lax.broadcast_in_dim(depth, column.shape, [0]))

        found = (
            plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), _BY_ROW),
            plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), plgpu.Layout.WGMMA),
        )
        found = lax.fori_loop(0, plain, partial(add_block, visible=None), found)
        masked = partial(add_block, visible=in_prefix, clean=True)
        found = lax.fori_loop(plain, in_pages, masked, found)
        if branch_blocks:
            found = lax.fori_loop(in_pages, count, partial(add_block, visible=in_branch), found)
        highest, sums, added = found
        maximum[part, b, head, rows] = highest
        total[part, b, head, rows] = sums
        output[part, b, head, rows] = added

    pl.when(thread == tiles)(copy_blocks)
    pl.when(thread < tiles)(attend)


def _set_registers(tiles: int, *, copies: bool) -> None:
    """Takes registers from the warpgroup that copies for those that compute.

    A core has 512 a lane of a warpgroup. They are dealt out evenly, and one thread can have 255, so
    that a single tile has enough.
    """
    if tiles > 1 and copies:
        plgpu.set_max_registers(24, action="decrease")
    elif tiles > 1:
        plgpu.set_max_registers((512 - 24) // tiles // 8 * 8, action="increase")


def _product(a: Ref, b: Ref, shape: tuple[int, int]) -> jax.Array:
    """a @ b, in float32."""

    def multiply(sums: Ref) -> jax.Array:
        plgpu.wgmma(sums, a, b)
        return sums[...]

    return pl.run_scoped(multiply, _Sums(shape, jnp.float32))
