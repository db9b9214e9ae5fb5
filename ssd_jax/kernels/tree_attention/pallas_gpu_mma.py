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
    soft_cap: float | None,
    interpret: bool,
) -> None:
    """One block of the grid.

    Args:
      kv_shared, weights_shared: [block, 2 * D], [ROWS, block].
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
    q = load(operands.q.at[part.b, part.head, rows], layout=lhs, optimized=False)
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
        keys = load(kv_shared.at[:, pl.ds(0, head_dim)].transpose((1, 0)), layout=rhs)
        zeros = plgpu.layout_cast(jnp.zeros((ROWS, block), jnp.float32), SUMS)
        scores = cap_scores(multiply(zeros, q, keys), soft_cap)
        scores = mask_scores(scores, visible, index)
        weights, maximum, rescale = softmax_weights(scores, softmax.maximum)
        weights_shared[...] = weights.astype(dtype)
        values = load(kv_shared.at[:, pl.ds(head_dim, head_dim)], layout=rhs)
        output = multiply(
            rescale_output(softmax.output, rescale), load(weights_shared, layout=lhs), values
        )
        return RunningSoftmax(maximum, softmax.total * rescale + weights.sum(axis=1), output), kv

    def add_branches(softmax: RunningSoftmax) -> RunningSoftmax:
        add_full = partial(
            add_block, blocks=part.branch_block, end=part.blocks, visible=branch_visible
        )
        first_block = fetch(part.branch_block(part.page_blocks))
        return lax.fori_loop(part.page_blocks, part.blocks, add_full, (softmax, first_block))[0]

    softmax = empty_softmax(head_dim), fetch(part.page_block(0))
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
