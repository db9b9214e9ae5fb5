"""Row-wise functions over large batches of vocabulary-sized rows."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from ssd_jax.kernels.row_sum import LONG

_BLOCK = 128


def map_rows(function: Callable[..., Any], *blocks: Any) -> Any:
    """Applies a function of blocks of rows; its result for a row must not depend on the others.

    On CPU it gets long rows one at a time: a row stays in the cache through all passes over it, and
    a branch is taken or not row by row. Elsewhere it gets all rows at once.

    Args:
      function: from blocks [n, ...] to a tree of blocks [n, ...].
      blocks: trees of arrays with the rows in front.
    """
    if max(array[0].size for array in jax.tree.leaves(blocks)) < LONG:
        return function(*blocks)
    by_one = functools.partial(_one_by_one, function)
    return jax.lax.platform_dependent(*blocks, cpu=by_one, default=function)


def first_best(values: jax.Array) -> jax.Array:
    """Lowest index of the largest value of each row, values [n, V] -> [n] int32.

    As `argmax`, which XLA on CPU runs one element at a time when its input is computed on the fly.
    """
    size = values.shape[-1]
    best = jnp.max(values, axis=-1, keepdims=True)
    index = jnp.min(jnp.where(values == best, jnp.arange(size), size), axis=-1)
    return jnp.minimum(index, size - 1).astype(jnp.int32)


def largest(values: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
    """The largest values of each row, descending, and their ids; equal ones by id.

    As `lax.top_k`, which is slow on long rows: the largest values lie in the blocks with the
    largest maxima, so only those are sorted through.

    Args:
      values: [n, V].
      count: how many, at most V.

    Returns: [n, count] values and int32 ids.
    """
    rows, size = values.shape
    if size < 2 * count * _BLOCK:
        return jax.lax.top_k(values, count)
    padding = ((0, 0), (0, -size % _BLOCK))
    blocks = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(rows, -1, _BLOCK)
    block = jnp.sort(jax.lax.top_k(jnp.max(blocks, axis=-1), count)[1])
    few = jnp.take_along_axis(blocks, block[:, :, None], axis=1).reshape(rows, -1)
    best, place = jax.lax.top_k(few, count)
    ids = jnp.take_along_axis(block, place // _BLOCK, axis=1) * _BLOCK + place % _BLOCK
    return best, ids.astype(jnp.int32)


def _one_by_one(function: Callable[..., Any], *blocks: Any) -> Any:
    def one(row: Any) -> Any:
        found = function(*jax.tree.map(lambda array: array[None], row))
        return jax.tree.map(lambda array: array[0], found)

    return jax.lax.map(one, blocks)
