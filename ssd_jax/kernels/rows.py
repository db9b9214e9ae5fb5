"""Row-wise functions of large batches of vocabulary-sized rows; a row's result does not depend on
the other rows."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float32, Int32, Shaped

from ssd_jax.compat import maxima_one_by_one
from ssd_jax.kernels.piece import Piece

LONG = 4096
"""A single row with this many elements counts as large."""

_BLOCK = 128
_MIN_BLOCK = 16  # the smallest that is worth making
_COLUMN_SHARDS = 8  # devices that may share columns without a block being cut
_SUM_LANES = 64  # of a row that are summed side by side
_MIN_PRODUCT_ROWS = 2  # one row rounds differently
_PRODUCT_COLUMNS = 8  # of ones; with 16, virtual devices of a mesh wait for each other for ever
_TAKE_ROWS = 64  # rows; a TPU copies blocks, padded to 128 columns, before it takes some of them
_MAX_BLOCK_ROWS = 256  # rows of a block of `in_blocks`; fewer than half as many would not fill it


def row_sum(x: Float32[Array, "*rows n"]) -> Float32[Array, "*rows 1"]:
    """Sum over the last axis; on CPU its rounding does not depend on the number of rows.

    XLA on CPU chooses the order of a sum by the size of the array (seen at 4,096 elements), as its
    library does with products (JAX 0.12.0.1: at 88 rows and 8 columns). So short rows are summed by
    additions of elements, whose order is part of the program; on a mesh by products with ones,
    since devices that share columns would exchange them for every addition.
    """
    if x.shape[-1] >= LONG:
        return _plain_sum(x)
    unsharded = jax.sharding.get_abstract_mesh().empty
    cpu_sum = _sum_in_order if unsharded else _sum_by_product
    return jax.lax.platform_dependent(x, cpu=cpu_sum, default=_plain_sum)


def _plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _sum_by_product(x: jax.Array) -> jax.Array:
    count = math.prod(x.shape[:-1])
    if count < _MIN_PRODUCT_ROWS:
        padded = jnp.pad(x.reshape(count, x.shape[-1]), ((0, _MIN_PRODUCT_ROWS - count), (0, 0)))
        return _sum_by_product(padded)[:count].reshape(*x.shape[:-1], 1)
    ones = jnp.ones((x.shape[-1], _PRODUCT_COLUMNS), jnp.float32)
    # Rows keep their axes: if they were flattened, devices that share an axis would exchange them.
    contract_last = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, ones, contract_last, precision="highest")[..., :1]


@jax.custom_jvp
def _sum_in_order(x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    # Else a product that x is made of may or may not be contracted with an addition.
    x = jnp.where(jnp.isnan(x), jnp.nan, x)
    lanes = min(_SUM_LANES, 1 << (width - 1).bit_length())
    if padding := -width % lanes:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padding)])
    total = x[..., :lanes]
    for start in range(lanes, width, lanes):
        total = total + x[..., start : start + lanes]
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes:]
    return total


@_sum_in_order.defjvp
def _sum_in_order_jvp(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
    return _sum_in_order(*primals), _plain_sum(*tangents)


def row_max(x: Float32[Array, "*rows n"]) -> Float32[Array, "*rows 1"]:
    """Largest value over the last axis, which no device may hold only a part of; for a row with
    NaN, any value."""
    if not maxima_one_by_one() or not jax.sharding.get_abstract_mesh().empty:
        return jnp.max(x, axis=-1, keepdims=True)

    def larger(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.where(a > b, a, b)

    return jax.lax.reduce(x, jnp.float32(-jnp.inf), larger, (x.ndim - 1,))[..., None]


class Norm(NamedTuple):
    """A root-mean-square norm: its weights, and the epsilon added to the mean square.

    Several heads may have each their own weights. Weights as a `Piece` are for products with packed
    weights only.
    """

    weight: Float32[Array, "*heads size"] | Piece
    eps: float


def rms_norm(x: Float32[Array, "*rows size"], norm: Norm) -> Float32[Array, "*rows size"]:
    """Root-mean-square norm of x over its last axis."""
    assert not isinstance(norm.weight, Piece)
    scale = jax.lax.rsqrt(row_sum(jnp.square(x)) / x.shape[-1] + norm.eps)
    return x * scale * norm.weight


def map_rows(function: Callable[..., Any], *blocks: Any) -> Any:
    """Applies a function of blocks of rows; its result for a row must not depend on the others.

    On CPU it gets long rows one at a time: a row stays in the cache for all passes over it, and
    branches are taken row by row. Elsewhere it gets all rows at once.

    Args:
      function: from blocks [n, ...] to a tree of blocks [n, ...].
      blocks: trees of arrays with the rows in front.
    """
    if max(array[0].size for array in jax.tree.leaves(blocks)) < LONG:
        return function(*blocks)

    def apply_to_row(row: Any) -> Any:
        result = function(*jax.tree.map(lambda array: array[None], row))
        return jax.tree.map(lambda array: array[0], result)

    def row_by_row(*blocks: Any) -> Any:
        return jax.lax.map(apply_to_row, blocks)

    return jax.lax.platform_dependent(*blocks, cpu=row_by_row, default=function)


def map_row_blocks(function: Callable[..., Any], *blocks: Any) -> Any:
    """Applies a function of many rows; its result for a row must not depend on the others.

    A TPU takes some of the rows at a time, so that what is made of long rows is small.

    Args:
      function, blocks: see `map_rows`.
    """
    rows = jax.tree.leaves(blocks)[0].shape[0]
    block_rows = max(count for count in range(1, _MAX_BLOCK_ROWS + 1) if rows % count == 0)
    if rows <= _MAX_BLOCK_ROWS or block_rows < _MAX_BLOCK_ROWS // 2:
        return function(*blocks)

    def block_by_block(*blocks: Any) -> Any:
        row_blocks = jax.tree.map(
            lambda array: array.reshape(-1, block_rows, *array.shape[1:]), blocks
        )
        results = jax.lax.map(lambda row_block: function(*row_block), row_blocks)
        return jax.tree.map(lambda array: array.reshape(rows, *array.shape[2:]), results)

    return jax.lax.platform_dependent(*blocks, tpu=block_by_block, default=function)


def take_rows(array: Shaped[Array, "n ..."], index: Int32[Array, "B"]) -> Shaped[Array, "B ..."]:
    """array[index], for a few long rows.

    Except on CPU, rows are sliced one by one: a TPU would gather from a copy of the whole array.
    """

    def sliced(array: jax.Array, index: jax.Array) -> jax.Array:
        return jnp.concatenate([jax.lax.dynamic_slice_in_dim(array, i, 1) for i in index])

    def gathered(array: jax.Array, index: jax.Array) -> jax.Array:
        return array.at[index].get(mode="promise_in_bounds")

    if array[0].size < LONG:
        return gathered(array, index)
    return jax.lax.platform_dependent(array, index, cpu=gathered, default=sliced)


def argmax(values: Float32[Array, "n V"]) -> Int32[Array, "n"]:
    """Lowest index of the largest value of each row."""
    return max_and_argmax(values)[1]


def max_and_argmax(values: Float32[Array, "n V"]) -> tuple[Float32[Array, "n"], Int32[Array, "n"]]:
    """The largest value of each row, and its lowest index.

    The index is `argmax`, which XLA on CPU runs one element at a time when its input is computed on
    the fly. Elsewhere one pass over the rows gives both.
    """
    return jax.lax.platform_dependent(
        values, cpu=_max_and_argmax_in_two_passes, default=_max_and_argmax_in_one_pass
    )


def _max_and_argmax_in_two_passes(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = values.shape[-1]
    best = row_max(values)
    index = jnp.min(jnp.where(values == best, jnp.arange(size), size), axis=-1)
    return best[:, 0], jnp.minimum(index, size - 1).astype(jnp.int32)


def _larger_pair(left: Sequence[jax.Array], right: Sequence[jax.Array]) -> Any:
    """The pair (value, index) with the larger value; if they are equal, with the lower index."""
    choose_left = (left[0] > right[0]) | ((left[0] == right[0]) & (left[1] < right[1]))
    return jax.tree.map(lambda a, b: jnp.where(choose_left, a, b), left, right)


def _max_and_argmax_in_one_pass(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    identity = (jnp.float32(-jnp.inf), jnp.int32(values.shape[1] - 1))
    best, index = jax.lax.reduce((values, index), identity, _larger_pair, (1,))
    return best, index


def best_and_mass(
    values: Float32[Array, "n V"], temperature: Float32[Array, "n 1"]
) -> tuple[Float32[Array, "n"], Int32[Array, "n"], Float32[Array, "n 1"]]:
    """`max_and_argmax`, and for each row the sum of exp((values - best) / temperature).

    On GPUs one pass over the rows gives all three. (TPUs keep rows where passes cost little.)
    """
    return jax.lax.platform_dependent(
        values,
        temperature,
        cuda=_mass_in_one_pass,
        rocm=_mass_in_one_pass,
        default=_mass_in_several_passes,
    )


def _mass_in_several_passes(
    values: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    best, index = max_and_argmax(values)
    return best, index, row_sum(jnp.exp((values - best[:, None]) / temperature))


def _mass_in_one_pass(
    values: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums parts of a row relative to their own best value, and rescales them on merging."""

    def merge(left: tuple[jax.Array, ...], right: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, index = _larger_pair(left[:2], right[:2])
        divisor = jnp.maximum(left[3], right[3])  # the identity's temperature is 0

        def rescale(part: tuple[jax.Array, ...]) -> jax.Array:
            # Both may be -inf, whose difference is NaN.
            exponent = jnp.where(part[0] == best, 0.0, (part[0] - best) / divisor)
            return part[2] * jnp.exp(exponent)

        return best, index, rescale(left) + rescale(right), divisor

    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    ones = (values > -jnp.inf).astype(jnp.float32)
    temperatures = jnp.broadcast_to(temperature, values.shape)
    identity = (
        jnp.float32(-jnp.inf),
        jnp.int32(values.shape[1] - 1),
        jnp.float32(0),
        jnp.float32(0),
    )
    best, index, total, _ = jax.lax.reduce(
        (values, index, ones, temperatures), identity, merge, (1,)
    )
    return best, index, total[:, None]


def top_k(
    values: Float32[Array, "n V"], count: int
) -> tuple[Float32[Array, "n {count}"], Int32[Array, "n {count}"]]:
    """The `count` largest values of each row, descending, and their ids; equal values by id.

    Same as `lax.top_k`, which is slow on long rows: the largest values lie in the blocks with the
    largest maxima, so only these blocks are searched.
    """
    size = values.shape[1]
    if count == 0 or size < 2 * count * _BLOCK:
        best, ids = jax.lax.top_k(values, count)
        return best, ids
    # If several devices share the columns, no block lies on two of them.
    shard_width = math.gcd(size, _BLOCK * _COLUMN_SHARDS) // _COLUMN_SHARDS
    width = shard_width if shard_width >= _MIN_BLOCK else _BLOCK
    return jax.lax.platform_dependent(
        values,
        cpu=functools.partial(_top_k_in_blocks, count=count, width=_BLOCK),
        tpu=functools.partial(
            _top_k_in_blocks, count=count, width=width, rows_at_a_time=_TAKE_ROWS
        ),
        default=functools.partial(_top_k_in_blocks, count=count, width=width),
    )


def _replicated(rows: Shaped[Array, "n m"]) -> Shaped[Array, "n m"]:
    """The rows, replicated if several devices share their columns: these exchange a few short rows
    once. To sort rows that are cut, they would exchange parts again and again."""
    if jax.sharding.get_abstract_mesh().empty:
        return rows
    return jax.lax.with_sharding_constraint(rows, PartitionSpec())


def _top_k_in_blocks(
    values: jax.Array, *, count: int, width: int, rows_at_a_time: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """The `top_k` of each row: of the values in the `count` blocks with the largest maxima.

    Args:
      width: columns of a block.
      rows_at_a_time: rows whose blocks are copied together; None is all.
    """
    rows, size = values.shape
    padding = ((0, 0), (0, -size % width))
    padded = jnp.pad(values, padding, constant_values=-jnp.inf)
    maxima = row_max(padded.reshape(rows, -1, width))[..., 0]
    block = _replicated(jnp.sort(jax.lax.top_k(_replicated(maxima), count)[1]))
    candidates = _replicated(_take_blocks(padded, block, width, rows_at_a_time).reshape(rows, -1))
    best, index = jax.lax.top_k(candidates, count)
    ids = jnp.take_along_axis(block, index // width, axis=1) * width + index % width
    return best, ids.astype(jnp.int32)


def _take_blocks(
    values: Float32[Array, "n V"],
    block: Int32[Array, "n c"],
    width: int,
    rows_at_a_time: int | None,
) -> Float32[Array, "n c {width}"]:
    """Blocks of each row, `rows_at_a_time` rows at a time."""

    def take_row_blocks(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return row[0].reshape(-1, width)[row[1]]

    rows = len(values)
    if rows_at_a_time is None or rows <= rows_at_a_time:
        blocks = values.reshape(rows, -1, width)
        return jnp.take_along_axis(blocks, block[:, :, None], axis=1)
    return jax.lax.map(take_row_blocks, (values, block), batch_size=rows_at_a_time)
