"""Pages of keys or values: how they are stored, written and read block by block.

A page array has shape [pages, kv_heads, page_size, head_dim]. A page table says which pages hold a
row's positions, in order: either an int32 array [B, P], or `Contiguous(first)` when row b owns the
single page first + b, which lets reads be slices instead of gathers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

BLOCK = 128
"""Positions that attention reduces at a time. Fixed by absolute position, so that a query's result
does not depend on how long its neighbours are. `page_size` is a multiple of it."""


class Contiguous(NamedTuple):
    """A page table in which row b owns the one page first + b."""

    first: jax.Array | int = 0


PageTable = jax.Array | Contiguous


def of_layer(page_table: PageTable, layer: jax.Array, pages_per_layer: int) -> PageTable:
    """The table of one layer when the pages of all layers lie in one array, layer by layer."""
    if isinstance(page_table, Contiguous):
        return Contiguous(page_table.first + layer * pages_per_layer)
    return page_table + layer * pages_per_layer


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype in which pages of `dtype` are stored on `platform`.

    On CPU, XLA widens a bfloat16 scatter to float32 over the whole array (milliseconds a layer),
    so bfloat16 pages carry their bits as uint16 there and updates stay in place.
    """
    if platform == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def encode(values: jax.Array, storage: jnp.dtype) -> jax.Array:
    """Casts keys or values of any float dtype to the pages' storage dtype."""
    if storage == jnp.uint16:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(storage)


def decode(stored: jax.Array) -> jax.Array:
    """The dtype attention computes in: float32 from uint16 bits, else the stored dtype."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)
    return stored


def write(
    pages: jax.Array, page_table: PageTable, positions: jax.Array, values: jax.Array
) -> jax.Array:
    """Writes one key or value per token.

    Args:
      pages: [pages, kv_heads, page_size, head_dim], in storage dtype.
      page_table: [B, P] int32 or `Contiguous`.
      positions: [B, R] int32 absolute positions; one outside [0, P * page_size) is not written.
      values: [B, R, kv_heads, head_dim], any float dtype.

    Returns: the updated pages (in place when the caller donates them).
    """
    return write_stored(pages, page_table, positions, encode(values, pages.dtype))


def write_stored(
    pages: jax.Array, page_table: PageTable, positions: jax.Array, stored: jax.Array
) -> jax.Array:
    """`write` of values that are in storage dtype already."""
    page_size = pages.shape[2]
    rows = jnp.arange(positions.shape[0])[:, None]
    if isinstance(page_table, Contiguous):
        page, offset = jnp.broadcast_to(page_table.first + rows, positions.shape), positions
        inside = (positions >= 0) & (positions < page_size)
    else:
        capacity = page_table.shape[1] * page_size
        inside = (positions >= 0) & (positions < capacity)
        safe = jnp.where(inside, positions, 0)
        page, offset = page_table[rows, safe // page_size], safe % page_size
    page = jnp.where(inside, page, pages.shape[0])
    return pages.at[page, :, offset].set(stored, mode="drop")


def read_block(pages: jax.Array, page_table: PageTable, block: jax.Array, batch: int) -> jax.Array:
    """Positions [block * BLOCK, (block + 1) * BLOCK) of `batch` rows.

    Returns: [B, kv_heads, BLOCK, head_dim] in the dtype of `decode`.
    """
    start = block * BLOCK
    _, heads, page_size, head_dim = pages.shape
    if isinstance(page_table, Contiguous):
        at = (page_table.first, 0, start, 0)
        return decode(jax.lax.dynamic_slice(pages, at, (batch, heads, BLOCK, head_dim)))
    page = jax.lax.dynamic_index_in_dim(page_table, start // page_size, axis=1, keepdims=False)

    def one_row(page_id: jax.Array) -> jax.Array:
        at = (page_id, 0, start % page_size, 0)
        return jax.lax.dynamic_slice(pages, at, (1, heads, BLOCK, head_dim))[0]

    return decode(jax.vmap(one_row)(page))
