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
    RunningSoftmax,
    SequencePart,
    Tile,
    Visible,
    cap_scores,
    empty_softmax,
    load,
    mask_scores,
    rescale_output,
    softmax_weights,
    swizzled,
)

CAPABILITIES = ("8.0", "8.6", "8.9", "9.0", "10.0", "10.3")
NEEDS = "8.0 to 10.3 (A100 to B200)"
"""Compute capability of GPUs for which JAX compiles it."""
PER_CORE = 2
"""Blocks of the grid that a core runs at a time: two have its registers."""
_PLGPU: Any = plgpu  # has no mma before JAX 0.11


def block(head_dim: int) -> int:
    """Most positions of a block: what a warp takes as one operand of them, for heads of up to 128,
    fills half of its registers."""
    return 4096 // head_dim


def most_tiles(head_dim: int) -> int:
    """Tiles of queries that share a block's keys and values."""
    del head_dim
    return 1


def _pieces(head_dim: int) -> list[Any]:
    """The columns of a head that are an operand at a time. Sums of wide heads take half of the
    registers, and leave them for no queries: these stay in shared memory."""
    width = head_dim if head_dim <= 128 else 64
    return [pl.ds(start, width) for start in range(0, head_dim, width)]


def threads(tiles: int) -> int:
    """Warpgroups of a block of the grid."""
    return tiles


def scratch(tiles: int, block: int, head_dim: int, dtype: Any, interpret: Any) -> list[Any]:
    """The kernel's shared memory."""
    del tiles, interpret
    shapes = [(block, 2 * head_dim), (ROWS, block)]
    if len(_pieces(head_dim)) > 1:
        shapes.append((ROWS, head_dim))
    return [
        plgpu.SMEM(shape, dtype=dtype, transforms=swizzled(shape[1], dtype)) for shape in shapes
    ]


def kernel(
    operands: Operands,
    results: Results,
    kv_shared: Ref,
    weights_shared: Ref,
    q_shared: Ref | None = None,
    *,
    branch_blocks: int,
    M: int,
    soft_cap: float | None,
    interpret: bool,
) -> None:
    """One block of the grid.

    Args:
      kv_shared, weights_shared: [block, 2 * D], [ROWS, block].
      q_shared: [ROWS, D], given for wide heads.
      branch_blocks, M: see `SequencePart`.
      soft_cap: of scores; see `AttentionVariant`.
      interpret: whether JAX interprets the kernel; it has no `mma`.
    """
    block, head_dim = kv_shared.shape[0], kv_shared.shape[1] // 2
    dtype = kv_shared.dtype
    lhs, rhs = (layout(dtype) for layout in (_PLGPU.Layout.MMA_LHS, _PLGPU.Layout.MMA_RHS))
    copy_layout = plgpu.Layout.SMEM_GMEM_COPY(kv_shared.shape, dtype, 128)
    part = SequencePart(operands, results, block=block, branch_blocks=branch_blocks, M=M)
    rows = pl.ds(lax.axis_index("tile") * ROWS, ROWS)
    q, pieces = operands.q.at[part.b, part.head, rows], _pieces(head_dim)
    if q_shared is None:
        q = load(q, layout=lhs, optimized=False)
    else:
        for piece in pieces:
            q_shared[:, piece] = load(q.at[:, piece], layout=SUMS, optimized=False)

    page_visible, branch_visible = part.visibility(rows)

    def multiply(sums: Tile, a: Tile, b: Tile) -> Tile:
        """sums + a @ b, in float32."""
        if interpret:
            return sums + jnp.dot(a, b, preferred_element_type=jnp.float32)
        return _PLGPU.mma(sums, a, b)

    def fetch(source: Ref) -> Tile:
        return load(source, layout=copy_layout, optimized=False)

    def add_block(
        index: jax.Array,
        carry: tuple[RunningSoftmax, Tile],
        *,
        blocks: Callable[[jax.Array], Ref],
        end: jax.Array,
        visible: Visible | None,
        clean: bool = False,
    ) -> tuple[RunningSoftmax, Tile]:
        """Adds the fetched block, and fetches the one behind it: of `blocks`, before `end`."""
        softmax, kv = carry
        if clean:  # what no query sees may be NaN, which a weight of 0 would keep
            # (Not as an operand: JAX numbers the rows of a right operand's layout wrongly.)
            row = plgpu.broadcasted_iota(jnp.int32, kv.shape, 0, layout=copy_layout)
            kv = jnp.where(row < part.visible_positions(index), kv, jnp.zeros_like(kv))
        kv_shared[...] = kv  # a store waits for all warps, before and after
        kv = fetch(blocks(jnp.minimum(index + 1, end - 1)))
        scores = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), SUMS)
        for piece in pieces:
            keys = load(kv_shared.at[:, piece].transpose((1, 0)), layout=rhs)
            of_piece = q if q_shared is None else load(q_shared.at[:, piece], layout=lhs)
            scores = multiply(scores, of_piece, keys)
        scores = mask_scores(cap_scores(scores, soft_cap), visible, index)
        weights, maximum, rescale = softmax_weights(scores, softmax.maximum)
        weights_shared[...] = weights.astype(dtype)
        total = softmax.total * rescale + weights.sum(axis=1)
        lhs_weights, output = load(weights_shared, layout=lhs), []
        rescaled = rescale_output(softmax.output, rescale)
        for piece, sums in zip(pieces, rescaled, strict=True):
            columns = pl.ds(head_dim + piece.start, piece.size)
            output.append(multiply(sums, lhs_weights, load(kv_shared.at[:, columns], layout=rhs)))
        return RunningSoftmax(maximum, total, tuple(output)), kv

    def add_branches(softmax: RunningSoftmax) -> RunningSoftmax:
        add_full = partial(
            add_block, blocks=part.branch_block, end=part.blocks, visible=branch_visible
        )
        first_block = fetch(part.branch_block(part.page_blocks))
        return lax.fori_loop(part.page_blocks, part.blocks, add_full, (softmax, first_block))[0]

    softmax = empty_softmax([piece.size for piece in pieces]), fetch(part.page_block(0))
    add_full = partial(add_block, blocks=part.page_block, end=jnp.maximum(part.page_blocks, 1))
    add_masked = partial(add_full, visible=page_visible, clean=True)
    first = part.first_unmasked
    if operands.window is not None:
        softmax = lax.fori_loop(0, first, add_masked, softmax)
    softmax = lax.fori_loop(first, part.unmasked_blocks, partial(add_full, visible=None), softmax)
    softmax, _ = lax.fori_loop(part.unmasked_blocks, part.page_blocks, add_masked, softmax)
    if branch_blocks:
        has_branches = part.blocks > part.page_blocks
        softmax = lax.cond(has_branches, add_branches, lambda softmax: softmax, softmax)
    part.store(rows, softmax)
