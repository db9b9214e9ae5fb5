"""The Mosaic GPU kernel of `pallas_gpu.py` for Hopper: softmaxes over parts of a sequence.

A block of the grid is (group of tiles of queries, part and sequence, key/value head). Each tile of
queries has a warpgroup, which goes over the part block by block. One more warpgroup copies the
blocks into a ring of slots that all others read.
"""

from __future__ import annotations

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
    Visible,
    cap_scores,
    empty_softmax,
    load,
    mask_scores,
    rescale_output,
    softmax_weights,
    swizzled,
)

CAPABILITIES = ("9.0",)
NEEDS = "9.0 (H100, H200)"
"""Compute capability of GPUs with `wgmma`."""
PER_CORE = 1
"""Blocks of the grid that a core runs at a time."""
_SLOTS = 128 << 10  # bytes of keys and values in shared memory
_Sums: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


def block(head_dim: int) -> int:
    """Most positions of a block: 16 KiB of keys, but no fewer than a layout of values has rows."""
    return max(ROWS, 8192 // head_dim)


def most_tiles(head_dim: int) -> int:
    """Most tiles of queries that share a block's keys and values; sums of wide heads take half of
    the registers that a thread can have."""
    return 3 if head_dim <= 128 else 2


def threads(tiles: int) -> int:
    """Warpgroups of a block of the grid."""
    return tiles + 1


def scratch(tiles: int, block: int, head_dim: int, dtype: Any, interpret: Any) -> list[Any]:
    """The kernel's shared memory and barriers."""
    memory = partial(plgpu.SMEM, dtype=dtype, transforms=swizzled(head_dim, dtype))
    slots = min(4, _SLOTS // (2 * block * head_dim * jnp.dtype(dtype).itemsize))
    return [
        memory((tiles, ROWS, head_dim)),
        memory((slots, block, head_dim)),
        memory((slots, block, head_dim)),
        plgpu.Barrier(num_barriers=tiles),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_barriers=slots),
        plgpu.Barrier(num_arrivals=tiles, num_barriers=slots),
        plgpu.Barrier(),
        *([memory((tiles, ROWS, block))] if interpret else []),
    ]


def kernel(
    operands: Operands,
    results: Results,
    q_shared: Ref,
    k_shared: Ref,
    v_shared: Ref,
    q_arrived: Ref,
    k_arrived: Ref,
    v_arrived: Ref,
    slot_free: Ref,
    values_clean: Ref,
    weights_shared: Ref | None = None,
    *,
    branch_blocks: int,
    M: int,
    soft_cap: float | None,
    interpret: bool,
) -> None:
    """One block of the grid.

    Args:
      q_shared, k_shared, v_shared: [tiles, ROWS, D], and [slots, block, D] twice.
      q_arrived, k_arrived, v_arrived: barriers of the copies to these.
      slot_free: barriers: all have read a slot.
      values_clean: barrier: unseen values in the last block are cleaned.
      weights_shared: [tiles, ROWS, block], given if `interpret`.
      branch_blocks, M: see `SequencePart`.
      soft_cap: of scores; see `AttentionVariant`.
      interpret: whether JAX interprets the kernel.
    """
    tiles, _, head_dim = q_shared.shape
    (slots, block, _), dtype = k_shared.shape, q_shared.dtype
    part = SequencePart(operands, results, block=block, branch_blocks=branch_blocks, M=M)
    thread = lax.axis_index("thread")

    def copy_blocks() -> None:
        """Copies the part's blocks, each as soon as its slot is free."""
        _set_registers(tiles, copies=True)

        def fill(index: jax.Array, _: None) -> None:
            slot = lax.rem(index, slots)
            pl.when(index >= slots)(lambda: plgpu.barrier_wait(slot_free.at[slot]))

            def copy(source: Ref) -> None:
                k, v = source.at[:, pl.ds(0, head_dim)], source.at[:, pl.ds(head_dim, head_dim)]
                plgpu.copy_gmem_to_smem(k, k_shared.at[slot], k_arrived.at[slot])
                plgpu.copy_gmem_to_smem(v, v_shared.at[slot], v_arrived.at[slot])

            pl.when(index < part.page_blocks)(lambda: copy(part.page_block(index)))
            if branch_blocks:
                pl.when(index >= part.page_blocks)(lambda: copy(part.branch_block(index)))

        lax.fori_loop(0, part.blocks, fill, None)

    def attend() -> None:
        """Reduces the part for a tile of queries."""
        _set_registers(tiles, copies=False)
        rows = pl.ds((lax.axis_index("tile") * tiles + thread) * ROWS, ROWS)
        q = operands.q.at[part.b, part.head, rows]
        plgpu.copy_gmem_to_smem(q, q_shared.at[thread], q_arrived.at[thread])
        page_visible, branch_visible = part.visibility(rows)
        plgpu.barrier_wait(q_arrived.at[thread])

        def add_block(
            index: jax.Array,
            softmax: RunningSoftmax,
            *,
            visible: Visible | None,
            clean: bool = False,
        ) -> RunningSoftmax:
            slot = lax.rem(index, slots)
            plgpu.barrier_wait(k_arrived.at[slot])
            keys = k_shared.at[slot].transpose((1, 0))
            scores = _product(q_shared.at[thread], keys, (ROWS, block))
            scores = cap_scores(scores, soft_cap)
            weights, maximum, rescale = softmax_weights(
                mask_scores(scores, visible, index), softmax.maximum
            )
            plgpu.barrier_wait(v_arrived.at[slot])
            if clean:
                clean_values(index, slot)
            (output,) = rescale_output(softmax.output, rescale)
            values, w = v_shared.at[slot], weights.astype(dtype)
            if not interpret:
                output = pl.run_state(lambda sums: plgpu.wgmma(sums, w, values))(_Sums.init(output))
            else:  # JAX interprets neither an operand in registers nor a sum that goes on
                assert weights_shared is not None
                weights_shared[thread] = w
                plgpu.commit_smem()
                output += _product(weights_shared.at[thread], values, (ROWS, head_dim))
            pl.when(index + slots < part.blocks)(lambda: plgpu.barrier_arrive(slot_free.at[slot]))
            total = softmax.total * rescale + weights.sum(axis=1)
            return RunningSoftmax(maximum, total, (output,))

        def clean_values(index: jax.Array, slot: jax.Array) -> None:
            """Zeroes values that no query sees: they may be NaN, which a weight of 0 would keep."""
            visible_rows = part.visible_positions(index)

            @pl.when(visible_rows < block)
            def _():
                @pl.when(thread == 0)
                def _():
                    for start in range(0, head_dim, 128):  # of more, registers would be spilled
                        columns = pl.ds(start, min(head_dim, 128))
                        v = load(v_shared.at[slot, :, columns], layout=SUMS)
                        row = plgpu.broadcasted_iota(jnp.int32, v.shape, 0, layout=SUMS)
                        v_shared[slot, :, columns] = jnp.where(row < visible_rows, v, 0)
                    plgpu.commit_smem()
                    plgpu.barrier_arrive(values_clean)

                plgpu.barrier_wait(values_clean)

        softmax = empty_softmax([head_dim])
        add_masked = partial(add_block, visible=page_visible, clean=True)
        first, add_full = part.first_unmasked, partial(add_block, visible=None)
        if operands.window is not None:
            softmax = lax.fori_loop(0, first, add_masked, softmax)
        softmax = lax.fori_loop(first, part.unmasked_blocks, add_full, softmax)
        softmax = lax.fori_loop(part.unmasked_blocks, part.page_blocks, add_masked, softmax)
        if branch_blocks:
            add_branches = partial(add_block, visible=branch_visible)
            softmax = lax.fori_loop(part.page_blocks, part.blocks, add_branches, softmax)
        part.store(rows, softmax)

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
