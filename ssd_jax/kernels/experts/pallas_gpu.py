"""`expert_products` on Hopper: a Mosaic GPU kernel that reads the weights of experts with rows.

An item is a few rows of one expert, and a block of the grid (part of 64 outputs, item): one
warpgroup, which multiplies chunk by chunk as copies of weights and rows arrive in a ring of slots.
Weights are the left operand, of which `wgmma` takes 64 rows, and rows of activations the right one,
of which 8 suffice; `gpu_operands.py` says how weights become one. Items without rows read nothing.
XLA puts the rows of items one after the other, since a copy to tiles of 8 rows that begins within
one leaves out what is in the next, and takes each row's sums out of its item.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32, Shaped

from ssd_jax.kernels.experts import gpu_operands
from ssd_jax.kernels.experts.gpu_operands import (
    OUTPUTS,
    GridBlock,
    Operand,
    Ref,
    arrays_of,
    operand_of,
    swizzled,
)
from ssd_jax.kernels.experts.groups import ExpertGroups, scale_rows
from ssd_jax.kernels.linear.group_form import GroupForm
from ssd_jax.kernels.linear.quantized import Quantized

CAPABILITIES = ("9.0",)
"""Compute capability of GPUs with `wgmma`."""
_MOST_ROWS = 128  # of an item
_LEAST_SLOTS = 2
_SUMS: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class _Items(NamedTuple):
    """Rows of one expert each, in the order of rows; the last ones may have none.

    Attributes:
      expert: -1 where there are no rows.
      rows: of the item, and others behind them, up to so many.
    """

    expert: Int32[Array, "items"]
    rows: Int32[Array, "items block"]


def why_not(outputs: int, inputs: int, kind: Any) -> str | None:
    """Why the kernel does not multiply with an expert's matrices of these sizes, in one line, or
    None.

    Args:
      kind: dtype of the weights, or their form on a device.
    """
    if isinstance(kind, GroupForm):
        return gpu_operands.why_no_groups(scale_rows(kind, inputs), minima=kind.minima)
    return gpu_operands.why_not(outputs, inputs, kind)


def takes(weight: Any) -> bool:
    """Whether the kernel multiplies with a weight of every expert."""
    if isinstance(weight, ExpertGroups):
        rows = weight.scales.shape[-2]
        return gpu_operands.why_no_groups(rows, minima=weight.minima is not None) is None
    [values] = arrays_of(weight)
    _, outputs, inputs = values.shape
    return gpu_operands.why_not(outputs, inputs, values.dtype) is None


def expert_products_pallas_gpu(
    x: Float32[Array, "m inputs"],
    group_sizes: Int32[Array, "E"],
    weights: Sequence[BFloat16[Array, "E outputs _"] | Quantized | ExpertGroups],
    *,
    used: float,
    interpret: Any = None,
) -> list[Float32[Array, "m _"]]:
    """`api.expert_products`.

    Args:
      used: see `api.expert_products`.
      interpret: `plgpu.InterpretGPUParams()` runs the kernel on a processor, in an interpreter.
    """
    rows, experts = len(x), len(group_sizes)
    average = pl.cdiv(rows, experts)
    block = min(max(1 << (average - 1).bit_length(), 8), _MOST_ROWS)
    count = rows // block + min(experts, rows)
    ends = jnp.cumsum(group_sizes)
    starts = ends - group_sizes
    blocks = pl.cdiv(group_sizes, block)
    through = jnp.cumsum(blocks)
    first = through - blocks
    number = jnp.arange(count, dtype=jnp.int32)
    of_item = jnp.sum(through <= number[:, None], axis=1, dtype=jnp.int32)
    is_real = of_item < experts
    expert = jnp.minimum(of_item, experts - 1)
    begin = jnp.where(is_real, starts[expert] + (number - first[expert]) * block, 0)
    of_items = jnp.minimum(begin[:, None] + jnp.arange(block, dtype=jnp.int32), rows - 1)
    items = _Items(jnp.where(is_real, expert, -1), of_items)
    # Where each row's sums are.
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = jnp.sum(ends <= row[:, None], axis=1, dtype=jnp.int32)
    has_expert, of_row = of_row < experts, jnp.minimum(of_row, experts - 1)
    offset = row - starts[of_row]
    place = jnp.clip(first[of_row] + offset // block, 0, count - 1), offset % block
    results = []
    for weight in weights:
        operand = operand_of(weight, x.shape[1], interpret=interpret is not None)
        of_x = operand.rows(x)
        sums = _sums(of_x.values, items, weight, operand, used, interpret)
        of_rows = sums[place[0], : operand.outputs, place[1]]
        if isinstance(weight, Quantized) and of_x.scales is not None:
            of_rows = of_rows * of_x.scales[:, None] * weight.scales[of_row]
        results.append(jnp.where(has_expert[:, None], of_rows, 0.0))
    return results


def _sums(
    x: Sequence[Shaped[Array, "m padded"]],
    items: _Items,
    weight: BFloat16[Array, "E outputs inputs"] | Quantized | ExpertGroups,
    operand: Operand,
    used: float,
    interpret: Any,
) -> Float32[Array, "items room block"]:
    """Sums of each item, of which only those of its own rows and of its outputs are meant."""
    arrays, (count, block) = arrays_of(weight), items.rows.shape
    of_items = jnp.concatenate([values[items.rows] for values in x], axis=1)
    width, dtype = of_items.shape[1], of_items.dtype
    of_items = of_items.reshape(count * width, -1)
    chunk, chunks = operand.chunk, operand.inputs // operand.chunk
    slots = operand.ring_bytes // (operand.chunk_bytes + dtype.itemsize * chunk * width)
    slots = min(max(slots, _LEAST_SLOTS), chunks)
    out = jax.ShapeDtypeStruct((count, operand.room, block), jnp.float32)
    call = plgpu.kernel(
        partial(_kernel, operand=operand, arrays=len(arrays), interpret=interpret is not None),
        out_type=out,
        scratch_types=[
            plgpu.SMEM((slots, width, chunk), dtype, transforms=swizzled(chunk, dtype)),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
            *operand.scratch(slots),
        ],
        grid=(pl.cdiv(operand.outputs, OUTPUTS), count),
        grid_names=("part", "item"),
        kernel_name="expert_products",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    with_rows = min(1.0, (used + len(x[0]) // block) / count)  # of the items, at most
    of_rows = with_rows * (of_items.nbytes + 4 * out.size)
    bytes_accessed = round(used * operand.expert_bytes + of_rows)
    # JAX does not tell XLA what such kernels cost.
    with jax.named_scope(f"bytes_accessed.{bytes_accessed}"):
        return call(items.expert, of_items, *arrays)


def _kernel(
    experts: Ref,
    x: Ref,
    *refs: Ref,
    operand: Operand,
    arrays: int,
    interpret: bool,
) -> None:
    """One block of the grid; see the module. `refs` begins with so many arrays of the weight."""
    weights, (sums, x_shared, arrived, *memory) = refs[:arrays], refs[arrays:]
    slots, width, chunk = x_shared.shape
    chunks = operand.inputs // chunk
    item = lax.axis_index("item")
    expert = experts[item]
    # The last part may have outputs of the one before, too.
    start = jnp.minimum(lax.axis_index("part") * OUTPUTS, operand.room - OUTPUTS)
    part = pl.ds(pl.multiple_of(start, 8), OUTPUTS)
    grid_block = GridBlock(weights, memory, expert, part)

    def copy(index: jax.Array | int) -> None:
        slot, columns = lax.rem(index, slots), pl.ds(index * chunk, chunk)
        operand.fetch(grid_block, index, slot, arrived.at[slot])
        of_rows = x.at[pl.ds(pl.multiple_of(item * width, 8), width), columns]
        plgpu.copy_gmem_to_smem(of_rows, x_shared.at[slot], arrived.at[slot])

    def pairs(index: jax.Array) -> Any:
        slot = lax.rem(index, slots)
        plgpu.barrier_wait(arrived.at[slot])
        return operand.pairs(grid_block, index, slot, x_shared.at[slot])

    def refill(index: jax.Array) -> None:
        pl.when(index + slots < chunks)(lambda: copy(index + slots))

    accumulated = _SUMS((OUTPUTS, width), operand.sum_dtype)

    @pl.when(expert >= 0)
    def _() -> None:
        operand.begin(grid_block)
        for index in range(slots):
            copy(jnp.int32(index))
        operand.wait(grid_block)
        if interpret:  # JAX interprets no sum that goes on

            def add(index: jax.Array, total: jax.Array) -> jax.Array:
                for left, right in pairs(index):
                    total += _product(left, right, accumulated)
                refill(index)
                return total

            layout = plgpu.Layout.WGMMA
            zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, width), operand.sum_dtype), layout)
            total = lax.fori_loop(0, chunks, add, zeros)
        else:

            def multiply(accumulator: Any) -> jax.Array:
                def add(index: jax.Array, _: None) -> None:
                    for left, right in pairs(index):
                        plgpu.wgmma(accumulator, left, right)
                        plgpu.wgmma_wait(0)
                    refill(index)

                lax.fori_loop(0, chunks, add, None)
                return accumulator[...]

            total = pl.run_scoped(multiply, accumulated)
        sums[item, part] = operand.total(total)


def _product(a: Any, b: Any, accumulated: Any) -> jax.Array:
    """a @ b, as it is accumulated."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, accumulated)
