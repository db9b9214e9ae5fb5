"""The Pallas kernel of `pallas_tpu.py`: one softmax over a sequence's pages and its branches.

A step of the grid is (group of key/value heads, sequence, tile of its queries). It goes once, block
by block, over the positions that some query of the tile sees. Meanwhile the next block is copied
into the other of two slots; during the last block, that is the next step's first block.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

_LOWEST = -1e30
Ref = Any
"""Ref of an array in one of a TPU's memories."""


class Tiles(NamedTuple):
    """Sizes that a kernel is compiled for.

    Attributes:
      heads: key/value heads a step.
      per_sequence: number of tiles that the queries of a sequence are cut into.
      rows: query rows a tile; a product takes `product_rows` of them.
      block: positions a product; a power of two.
      copy: positions of the largest copy; divides `block` and a page.
      min_copy: positions of the smallest copy; divides `copy`.
    """

    heads: int
    per_sequence: int
    rows: int
    product_rows: int
    block: int
    copy: int
    min_copy: int


class Options(NamedTuple):
    """What weights depend on besides queries and keys; see `variant.AttentionVariant`.

    Attributes:
      branches: number of branches of a sequence; 0 if it has none.
      sinks: whether there are any.
    """

    branches: int
    scale: float
    soft_cap: float | None
    sinks: bool


class TileSoftmax(NamedTuple):
    """Partial softmax-weighted sums over the positions seen so far, in float32.

    Attributes:
      maximum, total: [heads, rows, 1].
      output: [1, heads, rows, lanes], not normalised.
    """

    maximum: Ref
    total: Ref
    output: Ref


def kernel(
    table: Ref,
    first: Ref,
    length: Ref,
    q: Ref,
    limits: Ref,
    *refs: Ref,
    tiles: Tiles,
    options: Options,
) -> None:
    """One step of the grid.

    Args:
      table: [B, P] int32 in scalar memory.
      first, length: [steps + 1] int32 in scalar memory: a step sees positions [first, length). Both
        end with a 0.
      q: [1, heads, rows, half of the pages' lanes, or all].
      limits: [1, rows, 4] int32: a query sees positions [0] to [1] of the pages, and the entries of
        branch [2] whose bits are set in [3].
      refs: [1, heads, entries, lanes] of branches, if there are any; [heads, rows, 1] of sinks, if
        there are any; pages in HBM; the result; [2, heads, block, lanes], the slots; maxima and
        totals of the softmax; the next slot; the slots' semaphores.
    """
    *others, pages, output, slots, maximum, total, next_slot, semaphores = refs
    sinks = others.pop() if options.sinks else None
    group = pl.ds(pl.program_id(0) * tiles.heads, tiles.heads)
    copies = functools.partial(
        _copies, table, first, length, pages, slots, semaphores, tiles, group
    )
    step = pl.program_id(1) * tiles.per_sequence + pl.program_id(2)
    first_block, end_block = lax.div(first[step], tiles.block), pl.cdiv(length[step], tiles.block)
    state = TileSoftmax(maximum, total, output)
    maximum[...] = jnp.full_like(maximum, _LOWEST) if sinks is None else sinks[...]
    total[...] = jnp.zeros_like(total) if sinks is None else jnp.ones_like(total)
    output[...] = jnp.zeros_like(output)

    # A step copies the next step's first block; before the first step there is none to do so.
    @pl.when(step == 0)
    def _():
        next_slot[0] = 0
        copies(step, first_block, 0).start()

    # A step without a block has none during which to copy the next step's first one.
    @pl.when(first_block == end_block)
    def _():
        copies(step + 1, lax.div(first[step + 1], tiles.block), next_slot[0]).start()

    def for_each_part(add: Any) -> None:
        parts = tiles.rows // tiles.product_rows

        def add_part(index: jax.Array, _: None) -> None:
            row = pl.multiple_of(lax.rem(index, parts) * tiles.product_rows, tiles.product_rows)
            add(lax.div(index, parts), pl.ds(row, tiles.product_rows))

        lax.fori_loop(0, tiles.heads * parts, add_part, None, unroll=parts == 1)

    def add_block(block: jax.Array, slot: jax.Array) -> jax.Array:
        last = block + 1 == end_block
        next_step = jnp.where(last, step + 1, step)
        next_block = jnp.where(last, lax.div(first[next_step], tiles.block), block + 1)
        copies(next_step, next_block, 1 - slot).start()
        copies(step, block, slot).wait()
        start = block * tiles.block

        @pl.when((start < first[step]) | (start + tiles.block > length[step]))
        def _():  # unseen values may be NaN, which a weight of 0 does not remove
            position = start + lax.broadcasted_iota(jnp.int32, slots.shape[1:], 1)
            visible = (position >= first[step]) & (position < length[step])
            slots[slot] = jnp.where(visible, slots[slot], jnp.zeros_like(slots[slot]))

        def add(head: jax.Array, rows: Any) -> None:
            limit = limits[0, rows]
            position = start + lax.broadcasted_iota(jnp.int32, (tiles.product_rows, tiles.block), 1)
            mask = (position >= limit[:, 0:1]) & (position < limit[:, 1:2])
            _accumulate(state, head, rows, q, slots[slot, head], mask, options)

        for_each_part(add)
        return 1 - slot

    next_slot[0] = lax.fori_loop(first_block, end_block, add_block, next_slot[0])

    def add_branches(head: jax.Array, rows: Any) -> None:
        [branches] = others
        limit = limits[0, rows]
        shape = (tiles.product_rows, branches.shape[2])
        number = lax.broadcasted_iota(jnp.int32, shape, 1)
        entry = lax.div(number, options.branches)
        path_from_here = lax.shift_right_logical(jnp.broadcast_to(limit[:, 3:4], shape), entry)
        mask = number - entry * options.branches == limit[:, 2:3]
        mask &= (path_from_here & 1) == 1
        _accumulate(state, head, rows, q, branches[0, head], mask, options)

    if others:
        for_each_part(add_branches)

    def normalise(head: jax.Array, rows: Any) -> None:
        sums = total[head, rows]
        output[0, head, rows] /= jnp.where(sums == 0, 1.0, sums)

    for_each_part(normalise)


class _Copies(NamedTuple):
    """The copies of one block; every one that is started must be waited for."""

    for_each: Any

    def start(self) -> None:
        self.for_each(lambda copy: copy.start())

    def wait(self) -> None:
        self.for_each(lambda copy: copy.wait())


def _copies(
    table: Ref,
    first: Ref,
    length: Ref,
    pages: Ref,
    slots: Ref,
    semaphores: Ref,
    tiles: Tiles,
    heads: Any,
    step: jax.Array,
    block: jax.Array,
    slot: Any,
) -> _Copies:
    """Copies of what a step sees of a block: whole copies, then halves for the remainder."""
    start = block * tiles.block
    first_copy = lax.div(jnp.maximum(first[step] - start, 0), tiles.copy)
    visible = pl.cdiv(jnp.maximum(length[step] - start, 0), tiles.min_copy) * tiles.min_copy
    visible = jnp.minimum(visible, tiles.block)

    def for_each_copy(apply: Any) -> None:
        def copy_positions(offset: jax.Array, size: int) -> None:
            page_size = pages.shape[2]
            page = table[lax.div(step, tiles.per_sequence), lax.div(start + offset, page_size)]
            page_offset = pl.multiple_of(lax.rem(start + offset, page_size), size)
            apply(
                pltpu.make_async_copy(
                    pages.at[page, heads, pl.ds(page_offset, size)],
                    slots.at[slot, :, pl.ds(pl.multiple_of(offset, size), size)],
                    semaphores.at[slot],
                )
            )

        def copy_one(index: jax.Array, _: None) -> None:
            copy_positions(index * tiles.copy, tiles.copy)

        lax.fori_loop(first_copy, lax.div(visible, tiles.copy), copy_one, None)
        size = tiles.copy // 2
        while size >= tiles.min_copy:
            pl.when((visible & size) != 0)(
                functools.partial(copy_positions, visible & -(2 * size), size)
            )
            size //= 2

    return _Copies(for_each_copy)


def _accumulate(
    state: TileSoftmax,
    head: jax.Array,
    rows: Any,
    q: Ref,
    kv: jax.Array,
    mask: jax.Array,
    options: Options,
) -> None:
    """Adds positions [T, lanes] under a mask [rows, T] to the softmax of query rows."""
    half = kv.shape[1] // 2
    # A query over all lanes is 0 in the values' lanes; ignore the keys' lanes of its result.
    k, v = (kv, kv) if q.shape[3] == kv.shape[1] else (kv[:, :half], kv[:, half:])
    precision = lax.Precision.HIGHEST if kv.dtype == jnp.float32 else lax.Precision.DEFAULT
    product = functools.partial(
        lax.dot_general, precision=precision, preferred_element_type=jnp.float32
    )
    scores = product(q[0, head, rows], k, (((1,), (1,)), ((), ()))) * options.scale
    if options.soft_cap is not None:
        scores = jnp.tanh(scores / options.soft_cap) * options.soft_cap
    scores = jnp.where(mask, scores, _LOWEST)
    old_maximum = state.maximum[head, rows]
    maximum = jnp.maximum(old_maximum, jnp.max(scores, axis=1, keepdims=True))
    weights = jnp.where(mask, jnp.exp(scores - maximum), 0.0)
    rescale = jnp.exp(old_maximum - maximum)
    block_output = product(weights.astype(v.dtype), v, (((1,), (0,)), ((), ())))
    total = state.total[head, rows] * rescale
    state.maximum[head, rows] = maximum
    state.total[head, rows] = total + jnp.sum(weights, axis=1, keepdims=True)
    state.output[0, head, rows] = state.output[0, head, rows] * rescale + block_output
