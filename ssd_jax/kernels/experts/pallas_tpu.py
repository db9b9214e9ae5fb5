"""`expert_products` on TPUs: a Pallas kernel that reads the weights of experts with rows once each.

XLA's own grouped product may read all experts, however few have rows. Here a step of the grid is
(a part of the outputs, an item): a tile of rows with the weights of one expert that has rows in it.
Items follow each other as rows do, so that the pipeline fetches an expert's weights once for all
its tiles, and the next one's meanwhile. Each product is of all rows of a tile; those of other
experts keep what they have. So a row's bits depend on that row alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.experts.groups import ExpertGroups
from ssd_jax.kernels.experts.tpu_operands import OfExperts, ProductOperands, operands_of
from ssd_jax.kernels.linear.quantized import Quantized

_ROWS = 128  # of a tile, which a TPU multiplies in the time that fewer take
_BLOCK_BYTES = 2 << 20  # of a weight in a step; of each two are in memory
_LANES = 128


class _Items(NamedTuple):
    """What the steps do, in the order of rows; the last ones may have nothing to do.

    Attributes:
      expert: whose weights.
      tile: of rows.
      start, end: the rows of the expert; none for rows that no expert has.
    """

    expert: Int32[Array, "items"]
    tile: Int32[Array, "items"]
    start: Int32[Array, "items"]
    end: Int32[Array, "items"]


def expert_products_pallas_tpu(
    x: Float32[Array, "m inputs"],
    group_sizes: Int32[Array, "E"],
    weights: Sequence[Float[Array, "*layers E outputs _"] | Quantized | ExpertGroups],
    *,
    layer: Int32[Array, ""] | int = 0,
    used: float,
    share: float = 1.0,
    interpret: Any = False,
) -> list[Float32[Array, "m outputs"]]:
    """`api.expert_products` for weights of one shape, which are no `Packed`.

    Args:
      weights: of one layer, or of several, [layers, E, outputs, inputs].
      layer: the place of the layer in weights of several.
      used, share: see `api.expert_products`.
      interpret: whether, or how, the kernel runs in an interpreter on a processor.
    """
    operands = operands_of(x, weights)
    if operands is None:  # of several kinds
        options = {"layer": layer, "used": used, "share": share, "interpret": interpret}
        results = (expert_products_pallas_tpu(x, group_sizes, [w], **options) for w in weights)
        return [result for [result] in results]
    rows, experts = len(x), len(group_sizes)
    least = 32 // operands.rows[0].dtype.itemsize  # rows of a tile of memory
    tile = min(_ROWS, pl.cdiv(rows, least) * least)
    tiles = pl.cdiv(rows, tile)
    of_rows = [jnp.pad(array, ((0, tiles * tile - rows), (0, 0))) for array in operands.rows]
    part = _part(operands.outputs, operands.output_bytes)
    count = tiles + min(experts, rows)
    items = _items(group_sizes, tile, tiles, count)
    items = items._replace(expert=items.expert + layer * experts)
    of_weights = [array for arrays in operands.weights for array in arrays]
    # As rows of their own those of all experts would be laid out anew in every layer.
    arrays = [
        array[items.expert][:, None] if outputs_at is None else _in_memory(array, interpret)
        for array, outputs_at in of_weights
    ]

    def row_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, width), lambda n, i, _, tiles, *__: (tiles[i], 0))

    def weight_spec(weight: OfExperts) -> pl.BlockSpec:
        if weight.outputs_at is None:
            return pl.BlockSpec((1, 1, part), lambda n, i, *_: (i, 0, n))
        _, height, width = weight.array.shape
        if weight.outputs_at == 1:
            return pl.BlockSpec((1, part, width), lambda n, i, experts, *_: (experts[i], n, 0))
        return pl.BlockSpec((1, height, part), lambda n, i, experts, *_: (experts[i], 0, n))

    out_spec = pl.BlockSpec((tile, part), lambda n, i, _, tiles, *__: (tiles[i], n))
    out = jax.ShapeDtypeStruct((tiles * tile, operands.outputs), jnp.float32)
    weight_bytes = sum(array.nbytes // len(array) for array, _ in of_weights)
    results = pl.pallas_call(
        functools.partial(_kernel, operands=operands, tile=tile),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(pl.cdiv(operands.outputs, part), count),
            in_specs=[
                *(row_spec(array.shape[1]) for array in of_rows),
                *map(weight_spec, of_weights),
            ],
            out_specs=[out_spec] * len(weights),
            scratch_shapes=operands.scratch(part),
        ),
        out_shape=[out] * len(weights),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=round(share * 2 * rows * operands.products * operands.outputs * x.shape[1])
            * len(weights),
            bytes_accessed=round(used * weight_bytes)
            + sum(array.nbytes for array in of_rows)
            + len(weights) * out.size * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="expert_products",
    )(*items, *of_rows, *arrays)
    outputs = weights[0].outputs if isinstance(weights[0], ExpertGroups) else operands.outputs
    return [result[:rows, :outputs] for result in results]


def _in_memory(array: jax.Array, interpret: Any) -> jax.Array:
    """The array, which XLA would take whole to the chip for each call, with the experts of all
    layers, if it fits there."""
    return array if interpret else pltpu.with_memory_space_constraint(array, pltpu.HBM)


def _part(outputs: int, output_bytes: int) -> int:
    """Outputs of a step: all, or whole lanes of about as many in each."""
    parts = pl.cdiv(outputs * output_bytes, _BLOCK_BYTES)
    return outputs if parts == 1 else pl.cdiv(pl.cdiv(outputs, parts), _LANES) * _LANES


def _items(sizes: Int32[Array, "E"], tile: int, tiles: int, count: int) -> _Items:
    """The items of groups of these sizes, and of the rows behind them, which become zeros."""
    ends = jnp.cumsum(sizes)
    starts = jnp.append(ends - sizes, ends[-1])
    ends = jnp.append(ends, tiles * tile)
    visits = jnp.where(ends > starts, (ends - 1) // tile - starts // tile + 1, 0)
    through = jnp.cumsum(visits)
    number = jnp.arange(count, dtype=jnp.int32)
    group = jnp.sum(through <= number[:, None], axis=1, dtype=jnp.int32)
    nobody = len(sizes)
    group = jnp.minimum(group, nobody)
    of_tile = starts[group] // tile + number - (through - visits)[group]
    # What is not multiplied is not fetched either: it is what the step before had.
    last = jnp.max(jnp.where(sizes > 0, jnp.arange(nobody), 0))
    real = group < nobody
    return _Items(
        jnp.where(real, group, last).astype(jnp.int32),
        jnp.minimum(of_tile, tiles - 1).astype(jnp.int32),
        jnp.where(real, starts[group], 0).astype(jnp.int32),
        jnp.where(real, ends[group], 0).astype(jnp.int32),
    )


def _kernel(
    experts: Any,
    tiles: Any,
    starts: Any,
    ends: Any,
    *refs: Any,
    operands: ProductOperands,
    tile: int,
) -> None:
    """One step; see the module."""
    del experts
    item, take = pl.program_id(1), iter(refs)
    rows = [next(take) for _ in operands.rows]
    weights = [[next(take) for _ in arrays] for arrays in operands.weights]
    results = [next(take) for _ in weights]
    scratch = [*take]
    before = tiles[jnp.maximum(item - 1, 0)]

    @pl.when((item == 0) | (tiles[item] != before))
    def _() -> None:
        for result in results:
            result[...] = jnp.zeros_like(result)

    @pl.when(ends[item] > starts[item])
    def _() -> None:
        row = tiles[item] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        is_of_expert = (row >= starts[item]) & (row < ends[item])
        for weight, result in zip(weights, results, strict=True):
            sums = operands.product(rows, weight, scratch)
            result[...] = jnp.where(is_of_expert, sums, result[...])
