"""What the Mosaic GPU kernels share: a part of a sequence's entries, and its softmax.

A sequence's entries are the positions of its pages, in blocks that are dealt out to the parts in
turn, and, in the last part, those of its branches.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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


class Operands(NamedTuple):
    """The arguments of a kernel, in the GPU's memory.

    Attributes:
      table: [B, P] int32.
      length, whole: [B] int32: positions that some query of a sequence sees, and that all see.
      q: [B, kv_heads, Q, D], Q a multiple of the tiles of a block of the grid, already scaled.
      seen: [B, Q] int32: positions that each query sees.
      own: [2, B, Q] int32: the branch of each query, and the last depth of it that it sees.
      pages: [pages, kv_heads, page_size, 2 * D].
      branches: [B, kv_heads, E, 2 * D], E a multiple of the positions of a block; entry e is in
        branch e % M, at depth e // M. Entries that no query sees are finite.
    """

    table: Ref
    length: Ref
    whole: Ref
    q: Ref
    seen: Ref
    own: Ref
    pages: Ref
    branches: Ref


class Results(NamedTuple):
    """The softmax of each part.

    Attributes:
      maximum, total: [parts, B, kv_heads, Q] float32, of powers of two.
      output: [parts, B, kv_heads, Q, D] float32, not normalised.
    """

    maximum: Ref
    total: Ref
    output: Ref


class SoftmaxSoFar(NamedTuple):
    """The softmax of a tile of queries so far; see `Results`."""

    highest: Tile
    total: Tile
    output: Tile


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
        self.head, place = lax.axis_index("head"), lax.axis_index("part")
        self.parts = results.maximum.shape[0]  # of a sequence
        self.part, self.b = lax.rem(place, self.parts), lax.div(place, self.parts)
        self.limit = operands.length[self.b]
        # Blocks in which all queries see every position, blocks of pages, and all.
        self.plain = self._of_part(lax.div(operands.whole[self.b], block))
        self.in_pages = self._of_part(lax.div(self.limit + (block - 1), block))
        last = self.part == self.parts - 1
        self.count = self.in_pages + jnp.where(last, branch_blocks, 0)

    def _of_part(self, blocks: jax.Array) -> jax.Array:
        """Number of the first `blocks` blocks in this part. They are dealt out in turn, so that
        neither they nor a query's bits depend on other sequences' lengths."""
        return lax.div(jnp.maximum(blocks - self.part + (self.parts - 1), 0), self.parts)

    def _start(self, index: jax.Array | int) -> jax.Array:
        """Position of the first entry of the part's block."""
        return (self.part + index * self.parts) * self.block

    def inside(self, index: jax.Array) -> jax.Array:
        """Number of positions of a block of pages, from its first one, that some query sees."""
        return self.limit - self._start(index)

    def of_pages(self, index: jax.Array | int) -> Ref:
        """A block of pages: keys and values side by side, [block, 2 * D]. A block behind all pages
        is one of the last page."""
        table, pages = self.operands.table, self.operands.pages
        start = jnp.minimum(self._start(index), table.shape[1] * pages.shape[2] - self.block)
        page = table[self.b, lax.div(start, pages.shape[2])]
        within = pl.multiple_of(lax.rem(start, pages.shape[2]), self.block)
        return pages.at[page, self.head, pl.ds(within, self.block)]

    def of_branches(self, index: jax.Array) -> Ref:
        """A block of branches, likewise."""
        entry = pl.multiple_of((index - self.in_pages) * self.block, self.block)
        return self.operands.branches.at[self.b, self.head, pl.ds(entry, self.block)]

    def views(self, rows: Any) -> tuple[Visible, Visible]:
        """What a tile's queries, `rows`, see of the pages and of the branches."""
        operands = self.operands
        reach, branch, depth = (
            load(values.at[self.b, rows], layout=BY_ROW, optimized=False)
            for values in (operands.seen, operands.own.at[0], operands.own.at[1])
        )

        def in_pages(index: jax.Array, column: Tile) -> Tile:
            behind = reach - self._start(index)
            return column < lax.broadcast_in_dim(behind, column.shape, [0])

        def in_branches(index: jax.Array, column: Tile) -> Tile:
            entry = column + (index - self.in_pages) * self.block
            its_branch, its_depth = lax.rem(entry, self.M), lax.div(entry, self.M)
            its = its_branch == lax.broadcast_in_dim(branch, column.shape, [0])
            return its & (its_depth <= lax.broadcast_in_dim(depth, column.shape, [0]))

        return in_pages, in_branches

    def store(self, rows: Any, found: SoftmaxSoFar) -> None:
        """Writes a tile's softmax."""
        for result, value in zip(self.results, found, strict=True):
            result[self.part, self.b, self.head, rows] = value


def nothing(head_dim: int) -> SoftmaxSoFar:
    """The softmax of no entries."""
    return SoftmaxSoFar(
        plgpu.layout_cast(jnp.full((ROWS,), LOWEST, jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS,), jnp.float32), BY_ROW),
        plgpu.layout_cast(jnp.zeros((ROWS, head_dim), jnp.float32), SUMS),
    )


def masked(scores: Tile, visible: Visible | None, index: jax.Array) -> Tile:
    """A block's scores; None sees all."""
    if visible is None:
        return scores
    column = plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=SUMS)
    return jnp.where(visible(index, column), scores, MASKED)


def weigh(scores: Tile, highest: Tile) -> tuple[Tile, Tile, Tile]:
    """A block's weights, the new maximum, and what is left of earlier weights beside them."""
    most = jnp.maximum(highest, scores.max(axis=1) * LOG2_E)
    kept = jnp.exp2(highest - most)
    weights = jnp.exp2(scores * LOG2_E - lax.broadcast_in_dim(most, scores.shape, [0]))
    return weights, most, kept


def scaled(output: Tile, kept: Tile) -> Tile:
    """A sum of earlier values, with what is left of their weights."""
    return output * lax.broadcast_in_dim(kept, output.shape, [0])
