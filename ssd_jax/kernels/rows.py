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
_SHORT = 16  # the smallest that is worth making
_SHARES = 8  # devices that may share columns without a block being cut
_LANES = 64  # of a row that are summed side by side
_ROWS = 2  # one row rounds differently
_COLUMNS = 8  # of ones; with 16, virtual devices of a mesh wait for each other for ever
_AT_ONCE = 64  # rows; a TPU copies blocks, padded to 128 columns, before it takes some of them
_MOST = 256  # rows of a block of `in_blocks`; fewer than half as many would not fill it


def row_sum(x: Float32[Array, "*rows n"]) -> Float32[Array, "*rows 1"]:
    """Sum over the last axis; on CPU its rounding does not depend on the number of rows.

    XLA on CPU chooses the order of a sum by the size of the array (seen at 4,096 elements), as its
    library does with products (JAX 0.12.0.1: at 88 rows and 8 columns). So short rows are summed by
    additions of elements, whose order is part of the program; on a mesh by products with ones,
    since devices that share columns would exchange them for every addition.
    """
    if x.shape[-1] >= LONG:
        return _plain_sum(x)
    alone = jax.sharding.get_abstract_mesh().empty
    on_cpu = _sum_in_order if alone else _sum_by_product
    return jax.lax.platform_dependent(x, cpu=on_cpu, default=_plain_sum)


def _plain_sum(x: jax.Array) -> jax.Array:
    return jnp.sum(x, axis=-1, keepdims=True)


def _sum_by_product(x: jax.Array) -> jax.Array:
    count = math.prod(x.shape[:-1])
    if count < _ROWS:
        padded = jnp.pad(x.reshape(count, x.shape[-1]), ((0, _ROWS - count), (0, 0)))
        return _sum_by_product(padded)[:count].reshape(*x.shape[:-1], 1)
    ones = jnp.ones((x.shape[-1], _COLUMNS), jnp.float32)
    # Rows keep their axes: if they were flattened, devices that share an axis would exchange them.
    last = (((x.ndim - 1,), (0,)), ((), ()))
    return jax.lax.dot_general(x, ones, last, precision="highest")[..., :1]


@jax.custom_jvp
def _sum_in_order(x: jax.Array) -> jax.Array:
    width = x.shape[-1]
    # Else a product that x is made of may or may not be contracted with an addition.
    x = jnp.where(jnp.isnan(x), jnp.nan, x)
    lanes = min(_LANES, 1 << (width - 1).bit_length())
    if missing := -width % lanes:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    total = x[..., :lanes]
    for begin in range(lanes, width, lanes):
        total = total + x[..., begin : begin + lanes]
    while lanes > 1:
        lanes //= 2
        total = total[..., :lanes] + total[..., lanes:]
    return total


@_sum_in_order.defjvp
def _plain_change(primals: Sequence[jax.Array], tangents: Sequence[jax.Array]) -> Any:
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

    Weights as a `Piece` are for products with packed weights only.
    """

    weight: Float32[Array, "size"] | Piece
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

    def one(row: Any) -> Any:
        found = function(*jax.tree.map(lambda array: array[None], row))
        return jax.tree.map(lambda array: array[0], found)

    def one_by_one(*blocks: Any) -> Any:
        return jax.lax.map(one, blocks)

    return jax.lax.platform_dependent(*blocks, cpu=one_by_one, default=function)


def in_blocks(function: Callable[..., Any], *blocks: Any) -> Any:
    """Applies a function of many rows; its result for a row must not depend on the others.

    A TPU takes some of the rows at a time, so that what is made of long rows is small.

    Args:
      function, blocks: see `map_rows`.
    """
    rows = jax.tree.leaves(blocks)[0].shape[0]
    at_once = max(count for count in range(1, _MOST + 1) if rows % count == 0)
    if rows <= _MOST or at_once < _MOST // 2:
        return function(*blocks)

    def some(*blocks: Any) -> Any:
        parts = jax.tree.map(lambda array: array.reshape(-1, at_once, *array.shape[1:]), blocks)
        found = jax.lax.map(lambda part: function(*part), parts)
        return jax.tree.map(lambda array: array.reshape(rows, *array.shape[2:]), found)

    return jax.lax.platform_dependent(*blocks, tpu=some, default=function)


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


def first_best(values: Float32[Array, "n V"]) -> Int32[Array, "n"]:
    """Lowest index of the largest value of each row."""
    return best_of(values)[1]


def best_of(values: Float32[Array, "n V"]) -> tuple[Float32[Array, "n"], Int32[Array, "n"]]:
    """The largest value of each row, and its lowest index.

    The index is `argmax`, which XLA on CPU runs one element at a time when its input is computed on
    the fly. Elsewhere one pass over the rows gives both.
    """
    return jax.lax.platform_dependent(values, cpu=_best_in_two_passes, default=_best_in_one)


def _best_in_two_passes(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    size = values.shape[-1]
    best = row_max(values)
    index = jnp.min(jnp.where(values == best, jnp.arange(size), size), axis=-1)
    return best[:, 0], jnp.minimum(index, size - 1).astype(jnp.int32)


def _better(one: Sequence[jax.Array], other: Sequence[jax.Array]) -> Any:
    """The pair (value, index) with the larger value; if they are equal, with the lower index."""
    first = (one[0] > other[0]) | ((one[0] == other[0]) & (one[1] < other[1]))
    return jax.tree.map(lambda a, b: jnp.where(first, a, b), one, other)


def _best_in_one(values: jax.Array) -> tuple[jax.Array, jax.Array]:
    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    nothing = (jnp.float32(-jnp.inf), jnp.int32(values.shape[1] - 1))
    best, index = jax.lax.reduce((values, index), nothing, _better, (1,))
    return best, index


def best_and_mass(
    values: Float32[Array, "n V"], temperature: Float32[Array, "n 1"]
) -> tuple[Float32[Array, "n"], Int32[Array, "n"], Float32[Array, "n 1"]]:
    """`best_of`, and for each row the sum of exp((values - best) / temperature).

    On GPUs one pass over the rows gives all three. (TPUs keep rows where passes cost little.)
    """
    return jax.lax.platform_dependent(
        values, temperature, cuda=_mass_in_one, rocm=_mass_in_one, default=_mass_in_passes
    )


def _mass_in_passes(
    values: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    best, index = best_of(values)
    return best, index, row_sum(jnp.exp((values - best[:, None]) / temperature))


def _mass_in_one(
    values: jax.Array, temperature: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Sums parts of a row relative to their own best value, and rescales them on merging."""

    def joined(one: tuple[jax.Array, ...], other: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        best, index = _better(one[:2], other[:2])
        warm = jnp.maximum(one[3], other[3])

        def scaled(part: tuple[jax.Array, ...]) -> jax.Array:
            apart = jnp.where(part[0] == best, 0.0, (part[0] - best) / warm)  # both may be -inf
            return part[2] * jnp.exp(apart)

        return best, index, scaled(one) + scaled(other), warm

    index = jax.lax.broadcasted_iota(jnp.int32, values.shape, 1)
    each = (values > -jnp.inf).astype(jnp.float32)
    warm = jnp.broadcast_to(temperature, values.shape)
    nothing = (
        jnp.float32(-jnp.inf),
        jnp.int32(values.shape[1] - 1),
        jnp.float32(0),
        jnp.float32(0),
    )
    best, index, total, _ = jax.lax.reduce((values, index, each, warm), nothing, joined, (1,))
    return best, index, total[:, None]


def largest(
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
    even = math.gcd(size, _BLOCK * _SHARES) // _SHARES
    width = even if even >= _SHORT else _BLOCK
    return jax.lax.platform_dependent(
        values,
        cpu=functools.partial(_largest, count=count, width=_BLOCK),
        tpu=functools.partial(_largest, count=count, width=width, at_once=_AT_ONCE),
        default=functools.partial(_largest, count=count, width=width),
    )


def _whole(few: Shaped[Array, "n m"]) -> Shaped[Array, "n m"]:
    """The rows, whole on each device if several share columns: devices exchange a few short rows
    once. To sort cut rows, they would exchange parts again and again."""
    if jax.sharding.get_abstract_mesh().empty:
        return few
    return jax.lax.with_sharding_constraint(few, PartitionSpec())


def _largest(
    values: jax.Array, *, count: int, width: int, at_once: int | None = None
) -> tuple[jax.Array, jax.Array]:
    """See `largest`; blocks are taken from `at_once` rows at a time, if given."""
    rows, size = values.shape
    padding = ((0, 0), (0, -size % width))
    padded = jnp.pad(values, padding, constant_values=-jnp.inf)
    maxima = row_max(padded.reshape(rows, -1, width))[..., 0]
    block = _whole(jnp.sort(jax.lax.top_k(_whole(maxima), count)[1]))
    few = _whole(_taken(padded, block, width, at_once).reshape(rows, -1))
    best, place = jax.lax.top_k(few, count)
    ids = jnp.take_along_axis(block, place // width, axis=1) * width + place % width
    return best, ids.astype(jnp.int32)


def _taken(
    values: Float32[Array, "n V"], block: Int32[Array, "n c"], width: int, at_once: int | None
) -> Float32[Array, "n c {width}"]:
    """Blocks of each row, `at_once` rows at a time."""

    def of_row(row: tuple[jax.Array, jax.Array]) -> jax.Array:
        return row[0].reshape(-1, width)[row[1]]

    rows = len(values)
    if at_once is None or rows <= at_once:
        blocks = values.reshape(rows, -1, width)
        return jnp.take_along_axis(blocks, block[:, :, None], axis=1)
    return jax.lax.map(of_row, (values, block), batch_size=at_once)
