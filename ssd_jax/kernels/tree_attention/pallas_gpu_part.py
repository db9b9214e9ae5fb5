"""What the Mosaic GPU kernels share: a part of a sequence's entries, and its softmax.

A sequence's entries are the positions of its pages, in blocks that are dealt out to the parts in
turn, and, in the last part, those of its branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from ssd_jax.kernels.kv_pages import MAX_ENTRIES

ROWS = 64
"""Queries a tile."""
LOWEST = -1e30
MASKED = 2 * LOWEST
"""A score whose weight is 0 whatever the maximum."""
LOG2_E = math.log2(math.e)
Ref = Any
"""Ref of an array in one of a GPU's memories."""
Tile = Any
"""An array in registers, with a layout."""

load: Any = plgpu.load  # its signature differs before JAX 0.12
SUMS = plgpu.Layout.WGMMA
"""Layout of the results of both kinds of products."""
BY_ROW = SUMS.reduce(1)


def swizzled(width: int, dtype: Any) -> tuple[Any, Any]:
    """The layout in shared memory of rows of `width` numbers that products read."""
    size = jnp.dtype(dtype).itemsize
    swizzle = min(128, width * size)
    return plgpu.TilingTransform((8, swizzle // size)), plgpu.SwizzleTransform(swizzle)


class Window(NamedTuple):
    """Where the windows of queries begin.

    Attributes:
      start, common_start: [B] int32: the first position that some query of a sequence sees; from
        which on all see what they see of the pages at all.
      first: [B, Q] int32: the first position that each query sees.
    """

    start: Ref
    common_start: Ref
    first: Ref


class Operands(NamedTuple):
    """The arguments of a kernel, in the GPU's memory.

    Attributes:
      table: [B, P] int32.
      length, common_length: [B] int32: positions that some query of a sequence sees; that all see.
      q: [B, kv_heads, Q, D], Q a multiple of the tiles of a block of the grid, already scaled.
      visible: [B, Q] int32: positions that each query sees.
      paths: [2, B, Q] int32: the branch of each query, and its path there; see `Scratch`.
      pages: [pages, kv_heads, page_size, 2 * D].
      branches: [B, kv_heads, E, 2 * D], E a multiple of the positions of a block; entry e is in
        branch e % M, with number e // M there. Entries that no query sees are finite.
      window: None if all queries see their first positions.
    """

    table: Ref
    length: Ref
    common_length: Ref
    q: Ref
    visible: Ref
    paths: Ref
    pages: Ref
    branches: Ref
    window: Window | None = None


class Results(NamedTuple):
    """The softmax of each part.

    Attributes:
      maximum, total: [parts, B, kv_heads, Q] float32, of powers of two.
      output: [parts, B, kv_heads, Q, D] float32, not normalised.
    """

    maximum: Ref
    total: Ref
    output: Ref


class RunningSoftmax(NamedTuple):
    """The softmax of a tile of queries so far; see `Results`.

    Attributes:
      output: pieces side by side.
    """

    maximum: Tile
    total: Tile
    output: tuple[Tile, ...]


Visible = Callable[[jax.Array, Tile], Tile]
"""From a block's index in the part and its columns [ROWS, block] to what each query sees."""


class SequencePart:
    """The part that this block of the grid reduces, with axes "tile", "part" and "head".

    Args:
      block: positions a block.
      branch_blocks: number of blocks in `operands.branches`; 0 if there are none.
      M: branches of a sequence.
    """

    def __init__(
        self, operands: Operands, results: Results, *, block: int, branch_blocks: int, M: int
    ) -> None:
        self.operands, self.results = operands, results
        self.block, self.M = block, M
        self.head, index = lax.axis_index("head"), lax.axis_index("part")
        self.parts = results.maximum.shape[0]  # of a sequence
        self.part, self.b = lax.rem(index, self.parts), lax.div(index, self.parts)
        self.length = operands.length[self.b]
        # Blocks in which all queries see every position, blocks of pages, and all.
        self.unmasked_blocks = self._blocks_of_part(lax.div(operands.common_length[self.b], block))
        self.page_blocks = self._blocks_of_part(lax.div(self.length + (block - 1), block))
        # Before all windows there are blocks that are left out, and then some that are masked.
        self.left_out: jax.Array | None = None
        self.first_unmasked: jax.Array | int = 0
        if operands.window is not None:
            start = lax.div(operands.window.start[self.b], block)
            common = lax.div(operands.window.common_start[self.b] + (block - 1), block)
            self.left_out = self._blocks_of_part(start)
            self.page_blocks -= self.left_out
            self.first_unmasked = jnp.minimum(
                self._blocks_of_part(common) - self.left_out, self.page_blocks
            )
            self.unmasked_blocks = jnp.maximum(
                self.unmasked_blocks - self.left_out, self.first_unmasked
            )
        last = self.part == self.parts - 1
        self.blocks = self.page_blocks + jnp.where(last, branch_blocks, 0)

    def _blocks_of_part(self, blocks: jax.Array) -> jax.Array:
        """Number of the first `blocks` blocks in this part. They are dealt out in turn, so that
        neither they nor a query's bits depend on other sequences' lengths."""
        return lax.div(jnp.maximum(blocks - self.part + (self.parts - 1), 0), self.parts)

    def _start(self, index: jax.Array | int) -> jax.Array:
        """Position of the first entry of the part's block."""
        if self.left_out is not None:
            index = index + self.left_out
        return (self.part + index * self.parts) * self.block

    def visible_positions(self, index: jax.Array) -> jax.Array:
        """Number of positions of a block of pages, from its first one, that some query sees."""
        return self.length - self._start(index)

    def page_block(self, index: jax.Array | int) -> Ref:
        """A block of pages: keys and values side by side, [block, 2 * D]. A block behind all pages
        is one of the last page."""
        table, pages = self.operands.table, self.operands.pages
        start = jnp.minimum(self._start(index), table.shape[1] * pages.shape[2] - self.block)
        page = table[self.b, lax.div(start, pages.shape[2])]
        offset = pl.multiple_of(lax.rem(start, pages.shape[2]), self.block)
        return pages.at[page, self.head, pl.ds(offset, self.block)]

    def branch_block(self, index: jax.Array) -> Ref:
        """A block of branches, likewise."""
        entry = pl.multiple_of((index - self.page_blocks) * self.block, self.block)
        return self.operands.branches.at[self.b, self.head, pl.ds(entry, self.block)]

    def visibility(self, rows: Any) -> tuple[Visible, Visible]:
        """What a tile's queries, `rows`, see of the pages and of the branches."""
        operands = self.operands
        length, branch, path = (
            load(values.at[self.b, rows], layout=BY_ROW, optimized=False)
            for values in (operands.visible, operands.paths.at[0], operands.paths.at[1])
        )
        first = None
        if operands.window is not None:
            window = operands.window.first
            first = load(window.at[self.b, rows], layout=BY_ROW, optimized=False)

        def page_visible(index: jax.Array, column: Tile) -> Tile:
            visible_columns = length - self._start(index)
            visible = column < lax.broadcast_in_dim(visible_columns, column.shape, [0])
            if first is not None:
                hidden_columns = first - self._start(index)
                visible &= column >= lax.broadcast_in_dim(hidden_columns, column.shape, [0])
            return visible

        def branch_visible(index: jax.Array, column: Tile) -> Tile:
            entry = column + (index - self.page_blocks) * self.block
            same_branch = lax.rem(entry, self.M) == lax.broadcast_in_dim(branch, column.shape, [0])
            # The entries that pad a block have bits that no path has.
            bit = jnp.minimum(lax.div(entry, self.M), MAX_ENTRIES)
            path_bits = lax.broadcast_in_dim(path, column.shape, [0])
            on_path = lax.shift_right_logical(path_bits, bit) & 1
            return same_branch & (on_path == 1)

        return page_visible, branch_visible

    def store(self, rows: Any, softmax: RunningSoftmax) -> None:
        """Writes a tile's softmax."""
        maximum, total, output = self.results
        maximum[self.part, self.b, self.head, rows] = softmax.maximum
        total[self.part, self.b, self.head, rows] = softmax.total
        start = 0
        for piece in softmax.output:
            columns = pl.ds(start, piece.shape[1])
            output[self.part, self.b, self.head, rows, columns] = piece
            start += piece.shape[1]


def empty_softmax(widths: Sequence[int]) -> RunningSoftmax:
    """The softmax of no entries, whose output has pieces of these widths."""
    return RunningSoftmax(
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW),
        tuple(plgpu.layout_cast(jnp.zeros((ROWS, n), jnp.float32), SUMS) for n in widths),
    )


def cap_scores(scores: Tile, soft_cap: float | None) -> Tile:
    """A block's scores under a soft cap."""
    if soft_cap is None:
        return scores
    # By a power: a GPU's instruction for tanh has 11 bits.
    power = jnp.exp2(scores * (2 * LOG2_E / soft_cap))
    return soft_cap - 2 * soft_cap / (power + 1.0)


def mask_scores(scores: Tile, visible: Visible | None, index: jax.Array) -> Tile:
    """A block's scores; None sees all."""
    if visible is None:
        return scores
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=SUMS)
    return jnp.where(visible(index, column), scores, MASKED)


def softmax_weights(scores: Tile, maximum: Tile) -> tuple[Tile, Tile, Tile]:
    """A block's weights, the new maximum, and the factor of earlier weights under it."""
    new_maximum = jnp.maximum(maximum, scores.max(axis=1) * LOG2_E)
    rescale = jnp.exp2(maximum - new_maximum)
    weights = jnp.exp2(scores * LOG2_E - lax.broadcast_in_dim(new_maximum, scores.shape, [0]))
    return weights, new_maximum, rescale


def rescale_output(output: tuple[Tile, ...], rescale: Tile) -> tuple[Tile, ...]:
    """Sums of earlier values, with what is left of their weights."""
    return tuple(piece * lax.broadcast_in_dim(rescale, piece.shape, [0]) for piece in output)
