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

from ssd_jax.kernels.linear.quantized import DIGIT, W8A8, Quantized, digits
from ssd_jax.kernels.precision import precision

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
    weights: Sequence[Float[Array, "*layers E outputs _"] | Quantized],
    *,
    layer: Int32[Array, ""] | int = 0,
    used: float,
    interpret: Any = False,
) -> list[Float32[Array, "m outputs"]]:
    """`api.expert_products` for weights of one shape and kind, which are no `Packed`.

    Args:
      weights: of one layer, or of several, [layers, E, outputs, inputs].
      layer: the place of the layer in weights of several.
      used: see `api.expert_products`.
      interpret: whether, or how, the kernel runs in an interpreter on a processor.
    """
    rows, inputs = x.shape
    first = weights[0]
    quantized = isinstance(first, Quantized)
    experts = len(group_sizes)
    values = [weight.values if isinstance(weight, Quantized) else weight for weight in weights]
    outputs = values[0].shape[-2]
    values = [array.reshape(-1, outputs, inputs) for array in values]
    # Where inputs do not fill vectors, XLA has outputs side by side in memory.
    by_input = inputs % _LANES > 0 and outputs % _LANES == 0
    if by_input:
        values = [array.swapaxes(1, 2) for array in values]
    dtype = values[0].dtype
    least = 32 // dtype.itemsize  # rows of a tile of memory
    tile = min(_ROWS, pl.cdiv(rows, least) * least)
    tiles = pl.cdiv(rows, tile)
    x = jnp.pad(x, ((0, tiles * tile - rows), (0, 0)))
    lhs: list[jax.Array] = [x.astype(dtype)]
    scales: list[jax.Array] = []
    if quantized:
        high, low, of_rows = digits(x, single=isinstance(first, W8A8))
        lhs = [high] if low is None else [high, low]
        scales = [of_rows[:, None]]
    part = _part(outputs, inputs * dtype.itemsize)
    count = tiles + min(experts, rows)
    items = _items(group_sizes, tile, tiles, count)
    items = items._replace(expert=items.expert + layer * experts)
    # As rows of their own those of all experts would be laid out anew in every layer.
    for weight in weights:
        if isinstance(weight, Quantized):
            scales.append(weight.scales.reshape(-1, outputs)[items.expert][:, None])

    def of_rows_spec(width: int) -> pl.BlockSpec:
        return pl.BlockSpec((tile, width), lambda n, i, _, tiles, *__: (tiles[i], 0))

    weight_spec = pl.BlockSpec((1, part, inputs), lambda n, i, experts, *_: (experts[i], n, 0))
    if by_input:
        weight_spec = pl.BlockSpec((1, inputs, part), lambda n, i, experts, *_: (experts[i], 0, n))
    scale_spec = pl.BlockSpec((1, 1, part), lambda n, i, *_: (i, 0, n))
    in_specs = [of_rows_spec(inputs)] * len(lhs) + [weight_spec] * len(weights)
    if quantized:
        in_specs += [of_rows_spec(1)] + [scale_spec] * len(weights)
    out_spec = pl.BlockSpec((tile, part), lambda n, i, _, tiles, *__: (tiles[i], n))
    out = jax.ShapeDtypeStruct((tiles * tile, outputs), jnp.float32)
    weight_bytes = len(weights) * outputs * inputs * dtype.itemsize
    results = pl.pallas_call(
        functools.partial(
            _kernel, digits=len(lhs), weights=len(weights), tile=tile, inputs_at=int(not by_input)
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(items),
            grid=(pl.cdiv(outputs, part), count),
            in_specs=in_specs,
            out_specs=[out_spec] * len(weights),
        ),
        out_shape=[out] * len(weights),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=pl.CostEstimate(
            flops=2 * rows * len(lhs) * len(weights) * outputs * inputs,
            bytes_accessed=round(used * weight_bytes)
            + sum(array.nbytes for array in lhs)
            + len(weights) * out.size * 4,
            transcendentals=0,
        ),
        interpret=interpret,
        name="expert_products",
    )(*items, *lhs, *values, *scales)
    return [result[:rows] for result in results]


def _part(outputs: int, row_bytes: int) -> int:
    """Outputs of a step: all, or whole lanes of about as many in each."""
    parts = pl.cdiv(outputs * row_bytes, _BLOCK_BYTES)
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
    digits: int,
    weights: int,
    tile: int,
    inputs_at: int,
) -> None:
    """One step; see the module. `inputs_at` is the axis of a weight that has its inputs."""
    del experts
    item = pl.program_id(1)
    lhs, refs = refs[:digits], refs[digits:]
    rhs, refs = refs[:weights], refs[weights:]
    scales, results = refs[: len(refs) - weights], refs[len(refs) - weights :]
    before = tiles[jnp.maximum(item - 1, 0)]

    @pl.when((item == 0) | (tiles[item] != before))
    def _() -> None:
        for result in results:
            result[...] = jnp.zeros_like(result)

    @pl.when(ends[item] > starts[item])
    def _() -> None:
        row = tiles[item] * tile + jax.lax.broadcasted_iota(jnp.int32, (tile, 1), 0)
        is_of_expert = (row >= starts[item]) & (row < ends[item])
        for number, (weight, result) in enumerate(zip(rhs, results, strict=True)):
            sums = [_product(x[...], weight[0], inputs_at) for x in lhs]
            units = sums[0]
            if scales:
                units = units if digits == 1 else units + sums[1] / DIGIT
                units = units * scales[0][...] * scales[1 + number][0]
            result[...] = jnp.where(is_of_expert, units, result[...])


def _product(x: jax.Array, weight: jax.Array, inputs_at: int) -> jax.Array:
    """x times a weight, whose inputs are its axis `inputs_at`, in float32; of integers exact."""
    integers = jnp.issubdtype(weight.dtype, jnp.integer)
    sums = jax.lax.dot_general(
        x,
        weight,
        (((1,), (inputs_at,)), ((), ())),
        precision=precision(weight),
        preferred_element_type=jnp.int32 if integers else jnp.float32,
    )
    return sums.astype(jnp.float32)
