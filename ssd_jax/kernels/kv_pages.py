"""Keys or values: how pages of them are stored, written and read block by block; and those of
branches, which are not yet part of any page.

A page table says which pages hold a row's positions, in order: either an array, or
`Contiguous(first)` when row b owns the single page first + b, which lets reads be slices instead of
gathers.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int32, Shaped

BLOCK = 128
"""Positions that attention reduces at a time. Fixed by absolute position, so that a query's result
does not depend on how long its neighbours are. `page_size` is a multiple of it."""


class Contiguous(NamedTuple):
    """A page table in which row b owns the one page first + b."""

    first: Int32[Array, ""] | int = 0


PageTable = Int32[Array, "B P"] | Contiguous
PageArray = Shaped[Array, "pages kv_heads page_size head_dim"]
"""Keys or values in storage dtype; when layers are scanned, of one layer after the other."""


def of_layer(page_table: PageTable, layer: Int32[Array, ""], pages_per_layer: int) -> PageTable:
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


def encode(values: Shaped[Array, "*shape"], storage: jnp.dtype) -> Shaped[Array, "*shape"]:
    """Casts keys or values of any float dtype to the pages' storage dtype."""
    if storage == jnp.uint16 and values.dtype != storage:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(storage)


def decode(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """The dtype attention computes in: float32 from uint16 bits, else the stored dtype."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)
    return stored


def write(
    pages: PageArray,
    page_table: PageTable,
    positions: Int32[Array, "B R"],
    values: Shaped[Array, "B R kv_heads head_dim"],
) -> PageArray:
    """Writes one key or value per token (in place when the caller donates the pages).

    Args:
      positions: absolute; one outside [0, P * page_size) is not written.
      values: of any float dtype, or in storage dtype already.
    """
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
    return pages.at[page, :, offset].set(encode(values, pages.dtype), mode="drop")


def read_block(
    pages: PageArray, page_table: PageTable, block: Int32[Array, ""], batch: int
) -> Float[Array, "B kv_heads BLOCK head_dim"]:
    """Positions [block * BLOCK, (block + 1) * BLOCK) of `batch` rows."""
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


class Scratch(NamedTuple):
    """Keys and values of branch tokens; entry (d, m) is the token of branch m at depth d.

    Attributes:
      ancestor: each query's (branch, depth). It sees the entries of its own branch at depths
        0..depth; depth -1 sees none.
    """

    k: Shaped[Array, "B kv_heads depths M head_dim"]
    v: Shaped[Array, "B kv_heads depths M head_dim"]
    ancestor: Int32[Array, "B R 2"]

    def write(
        self, k: Float[Array, "B R kv_heads head_dim"], v: Float[Array, "B R kv_heads head_dim"]
    ) -> Scratch:
        """With each query's own key and value at its (branch, depth)."""
        rows = jnp.arange(k.shape[0])[:, None]
        branch, depth = self.ancestor[..., 0], self.ancestor[..., 1]
        depth = jnp.where(depth < 0, self.k.shape[2], depth)

        def put(stored: jax.Array, values: jax.Array) -> jax.Array:
            encoded = encode(values, stored.dtype)
            return stored.at[rows, :, depth, branch].set(encoded, mode="drop")

        return self._replace(k=put(self.k, k), v=put(self.v, v))
