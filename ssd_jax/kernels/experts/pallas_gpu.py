"""`expert_products` on Hopper: a Mosaic GPU kernel that reads the weights of experts with rows.

An item is a few rows of one expert, and a block of the grid (part of 64 outputs, item): one
warpgroup, which multiplies chunk by chunk as copies of weights and rows arrive in a ring of slots.
Weights are the left operand, of which `wgmma` takes 64 rows, and rows of activations the right one,
of which 8 suffice. Items without rows read nothing. XLA takes each row's sums out of its item.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, BFloat16, Float32, Int32

CAPABILITIES = ("9.0",)
"""Compute capability of GPUs with `wgmma`."""
OUTPUTS = 64
"""Of a block of the grid."""
_CHUNKS = (128, 64, 32)  # inputs at a time: the first that divides them
_RING_BYTES = 96 << 10  # of shared memory, for chunks on their way
_MOST_ROWS = 128  # of an item
_SUMS: Any = plgpu.ACC  # pyright: ignore[reportPrivateImportUsage]


class _Items(NamedTuple):
    """Rows of one expert each, in the order of rows; the last ones may have none.

    Attributes:
      expert: -1 where there are no rows.
      begin: the first row.
    """

    expert: Int32[Array, "items"]
    begin: Int32[Array, "items"]


def why_not(outputs: int, inputs: int, dtype: Any) -> str | None:
    """Why the kernel does not multiply with weights [E, outputs, inputs], in one line, or None."""
    if jnp.dtype(dtype) != jnp.bfloat16:
        return f"weights of {jnp.dtype(dtype).name}: it needs bfloat16"
    if outputs < OUTPUTS or outputs % 8:
        return f"{outputs} outputs: it needs {OUTPUTS} at least, and a multiple of 8"
    if inputs % _CHUNKS[-1]:
        return f"{inputs} inputs: it needs a multiple of {_CHUNKS[-1]}"
    return None


def expert_products_pallas_gpu(
    x: Float32[Array, "m inputs"],
    group_sizes: Int32[Array, "E"],
    weights: Sequence[BFloat16[Array, "E outputs _"]],
    *,
    used: float,
    interpret: Any = None,
) -> list[Float32[Array, "m outputs"]]:
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
    begin = starts[expert] + (number - first[expert]) * block
    items = _Items(jnp.where(is_real, expert, -1), jnp.where(is_real, begin, 0).astype(jnp.int32))
    # Where each row's sums are.
    row = jnp.arange(rows, dtype=jnp.int32)
    of_row = jnp.sum(ends <= row[:, None], axis=1, dtype=jnp.int32)
    has_expert, of_row = of_row < experts, jnp.minimum(of_row, experts - 1)
    offset = row - starts[of_row]
    place = jnp.clip(first[of_row] + offset // block, 0, count - 1), offset % block
    # Copies into tiles of 8 rows are of an array with as many rows, or a multiple.
    padded = jnp.pad(x.astype(jnp.bfloat16), ((0, block + -rows % 8), (0, 0)))
    results = []
    for weight in weights:
        sums = _sums(padded, items, weight, block, used, interpret)
        of_rows = sums[place[0], :, place[1]]
        results.append(jnp.where(has_expert[:, None], of_rows, 0.0))
    return results


def _sums(
    x: BFloat16[Array, "padded inputs"],
    items: _Items,
    weight: BFloat16[Array, "E outputs inputs"],
    block: int,
    used: float,
    interpret: Any,
) -> Float32[Array, "items outputs {block}"]:
    """Sums of each item, of which only those of its own rows are meant."""
    _, outputs, inputs = weight.shape
    count = len(items.expert)
    chunk = next(size for size in _CHUNKS if inputs % size == 0)
    slots = min(_RING_BYTES // (2 * chunk * (OUTPUTS + block)), inputs // chunk)
    memory = partial(plgpu.SMEM, dtype=jnp.bfloat16, transforms=_swizzled(chunk))
    body = functools.partial(_kernel, interpret=interpret is not None)
    out = jax.ShapeDtypeStruct((count, outputs, block), jnp.float32)
    call = plgpu.kernel(
        body,
        out_type=out,
        scratch_types=[
            memory((slots, OUTPUTS, chunk)),
            memory((slots, block, chunk)),
            plgpu.Barrier(num_arrivals=2, num_barriers=slots),
        ],
        grid=(pl.cdiv(outputs, OUTPUTS), count),
        grid_names=("part", "item"),
        kernel_name="expert_products",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
        interpret=interpret,
    )
    bytes_accessed = round(2 * used * outputs * inputs) + x.nbytes + 4 * out.size
    # JAX does not tell XLA what such kernels cost.
    with jax.named_scope(f"bytes_accessed.{bytes_accessed}"):
        return call(*items, x, weight)


def _swizzled(chunk: int) -> tuple[Any, Any]:
    """The layout in shared memory that products read."""
    swizzle = min(128, 2 * chunk)
    return plgpu.TilingTransform((8, swizzle // 2)), plgpu.SwizzleTransform(swizzle)


def _kernel(
    experts: Any,
    begins: Any,
    x: Any,
    weight: Any,
    sums: Any,
    weight_shared: Any,
    x_shared: Any,
    arrived: Any,
    *,
    interpret: bool,
) -> None:
    """One block of the grid; see the module."""
    slots, _, chunk = weight_shared.shape
    block, (_, outputs, inputs) = x_shared.shape[1], weight.shape
    chunks = inputs // chunk
    item = lax.axis_index("item")
    expert, begin = experts[item], begins[item]
    # The last part has outputs of the one before, too.
    start = jnp.minimum(lax.axis_index("part") * OUTPUTS, outputs - OUTPUTS)
    part = pl.ds(pl.multiple_of(start, 8), OUTPUTS)

    def copy(index: jax.Array | int) -> None:
        slot, columns = lax.rem(index, slots), pl.ds(index * chunk, chunk)
        of_expert = weight.at[expert, part, columns]
        of_rows = x.at[pl.ds(begin, block), columns]
        plgpu.copy_gmem_to_smem(of_expert, weight_shared.at[slot], arrived.at[slot])
        plgpu.copy_gmem_to_smem(of_rows, x_shared.at[slot], arrived.at[slot])

    def operands(index: jax.Array) -> tuple[Any, Any]:
        slot = lax.rem(index, slots)
        plgpu.barrier_wait(arrived.at[slot])
        return weight_shared.at[slot], x_shared.at[slot].transpose((1, 0))

    def refill(index: jax.Array) -> None:
        pl.when(index + slots < chunks)(lambda: copy(index + slots))

    @pl.when(expert >= 0)
    def _() -> None:
        for index in range(slots):
            copy(jnp.int32(index))
        if interpret:  # JAX interprets no sum that goes on

            def add(index: jax.Array, total: jax.Array) -> jax.Array:
                total += _product(*operands(index), (OUTPUTS, block))
                refill(index)
                return total

            layout = plgpu.Layout.WGMMA
            zeros = plgpu.layout_cast(jnp.zeros((OUTPUTS, block), jnp.float32), layout)
            total = lax.fori_loop(0, chunks, add, zeros)
        else:

            def multiply(accumulator: Any) -> jax.Array:
                def add(index: jax.Array, _: None) -> None:
                    plgpu.wgmma(accumulator, *operands(index))
                    plgpu.wgmma_wait(0)
                    refill(index)

                lax.fori_loop(0, chunks, add, None)
                return accumulator[...]

            total = pl.run_scoped(multiply, _SUMS((OUTPUTS, block), jnp.float32))
        sums[item, part] = total


def _product(a: Any, b: Any, shape: tuple[int, int]) -> jax.Array:
    """a @ b, in float32."""

    def multiply(accumulator: Any) -> jax.Array:
        plgpu.wgmma(accumulator, a, b)
        return accumulator[...]

    return pl.run_scoped(multiply, _SUMS(shape, jnp.float32))
