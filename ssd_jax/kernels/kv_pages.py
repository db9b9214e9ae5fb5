"""KV pages: how keys and values are stored, written and read block by block; and those of branches,
which are not yet part of any page.

A position's key and value lie side by side, in the first and second half of the last axis. Its
width is twice the head size, or `lane_width` of it where TPU kernels read the pages.

A page table lists the pages that hold a row's positions, in order. It is an array, or
`Contiguous(first)` when row b owns the single page first + b; reads are then slices instead of
gathers.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jaxtyping import Array, Bool, Float, Int32, Shaped

BLOCK = 128
"""Positions that attention reduces at a time. Blocks are fixed by absolute position, so that a
query's result does not depend on its neighbours' lengths; in pages that this does not divide, the
largest size that divides both."""

LANES = 128
"""Lanes of a TPU's vectors."""


@functools.partial(jax.tree_util.register_dataclass, data_fields=["first"], meta_fields=["reach"])
@dataclasses.dataclass(frozen=True)
class Contiguous:
    """A page table in which row b owns the one page first + b.

    Attributes:
      reach: most positions that any query sees, a whole number of blocks; None is the whole page.
    """

    first: Int32[Array, ""] | int = 0
    reach: int | None = None


PageTable = Int32[Array, "B P"] | Contiguous
PageArray = Shaped[Array, "pages kv_heads page_size width"]
"""Keys and values in storage dtype; of all layers, layer after layer, if they share an array."""


def as_array(page_table: PageTable, rows: int) -> Int32[Array, "B P"]:
    """The page table of B rows as an array."""
    if isinstance(page_table, Contiguous):
        return page_table.first + jnp.arange(rows, dtype=jnp.int32)[:, None]
    return page_table


def layer_page_table(
    page_table: PageTable, layer: Int32[Array, ""] | int, pages_per_layer: int
) -> PageTable:
    """The page table of one layer, where one array holds the pages of all layers in order."""
    if isinstance(page_table, Contiguous):
        return dataclasses.replace(page_table, first=page_table.first + layer * pages_per_layer)
    return page_table + layer * pages_per_layer


def storage_dtype(dtype: jnp.dtype, platform: str) -> jnp.dtype:
    """The dtype in which pages of `dtype` are stored on `platform`.

    On CPU, XLA widens a bfloat16 scatter to float32 over the whole array (milliseconds a layer),
    so there bfloat16 pages hold their bits as uint16, and updates stay in place.
    """
    if platform == "cpu" and dtype == jnp.bfloat16:
        return jnp.dtype(jnp.uint16)
    return jnp.dtype(dtype)


def lane_width(head_dim: int) -> int:
    """The width of pages that TPU kernels read: keys and values side by side, each padded with
    zeros where the two would not fill whole vectors. XLA lays out arrays of other widths with the
    positions as lanes."""
    return -(-2 * head_dim // LANES) * LANES


def contain_nonfinite(
    k: Float[Array, "B R kv_heads d"], v: Float[Array, "B R kv_heads d"]
) -> tuple[Float[Array, "B R kv_heads d"], Float[Array, "B R kv_heads d"]]:
    """Keys and values in which a token with non-finite numbers affects only queries that see it.

    Its key has NaN where either has no number, so that the scores are NaN; its value, which other
    queries multiply by 0, has 0 there.
    """
    finite = jnp.isfinite(v)
    return jnp.where(jnp.isfinite(k) & finite, k, jnp.nan), jnp.where(finite, v, 0.0)


def pack_kv(
    k: Float[Array, "*shape head_dim"], v: Float[Array, "*shape head_dim"], width: int
) -> Float[Array, "*shape {width}"]:
    """Keys and values side by side in `width`: each at the start of a half, padded with zeros."""
    padding = [(0, 0)] * (k.ndim - 1) + [(0, width // 2 - k.shape[-1])]
    halves = (k, v) if padding[-1] == (0, 0) else (jnp.pad(k, padding), jnp.pad(v, padding))
    return jnp.concatenate(halves, axis=-1)


def encode(values: Shaped[Array, "*shape"], storage: jnp.dtype) -> Shaped[Array, "*shape"]:
    """Casts keys and values of any float dtype to the pages' storage dtype."""
    if storage == jnp.uint16 and values.dtype != storage:
        return jax.lax.bitcast_convert_type(values.astype(jnp.bfloat16), jnp.uint16)
    return values.astype(storage)


def decode(stored: Shaped[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Stored values as attention computes with them: uint16 bits as float32, others unchanged."""
    if stored.dtype == jnp.uint16:
        return jax.lax.bitcast_convert_type(stored, jnp.bfloat16).astype(jnp.float32)
    return stored


def write(
    pages: PageArray,
    page_table: PageTable,
    positions: Int32[Array, "B R"],
    values: Shaped[Array, "B R kv_heads width"],
    *,
    windows: bool = False,
) -> PageArray:
    """Writes the key and value of each token (in place when the caller donates the pages).

    Args:
      positions: absolute; one outside [0, P * page_size) is not written.
      values: of any float dtype, or in storage dtype already.
      windows: reads, changes and writes a window of R positions a row, since on TPUs XLA copies
        all pages for a scatter. A row's tokens must then form one run: token r goes to
        position s + r, or outside.
    """
    values = encode(values, pages.dtype)
    if windows:
        return _write_windows(pages, page_table, positions, values)
    page_size = pages.shape[2]
    rows = jnp.arange(positions.shape[0])[:, None]
    inside = _inside(pages, page_table, positions)
    if isinstance(page_table, Contiguous):
        page, offset = jnp.broadcast_to(page_table.first + rows, positions.shape), positions
    else:
        safe = jnp.where(inside, positions, 0)
        page, offset = page_table[rows, safe // page_size], safe % page_size
    page = jnp.where(inside, page, pages.shape[0])
    return pages.at[page, :, offset].set(values, mode="drop")


def _inside(
    pages: PageArray, page_table: PageTable, positions: Int32[Array, "B R"]
) -> Bool[Array, "B R"]:
    count = 1 if isinstance(page_table, Contiguous) else page_table.shape[1]
    return (positions >= 0) & (positions < count * pages.shape[2])


def _write_windows(
    pages: PageArray,
    page_table: PageTable,
    positions: Int32[Array, "B R"],
    values: Shaped[Array, "B R kv_heads width"],
) -> PageArray:
    """Writes each row's run, one window for every page that the run may reach.

    A window is shifted to lie whole within its page; the positions of its tokens decide which of
    its entries are written.
    """
    batch, count = positions.shape
    _, heads, page_size, width = pages.shape
    window = min(count, page_size)
    nowhere = jnp.iinfo(jnp.int32).min
    valid = _inside(pages, page_table, positions)
    # Token r of a run is at start + r, so every valid token tells where its row's run starts.
    run_start = jnp.where(valid, positions - jnp.arange(count), page_size * pages.shape[0])
    start = jnp.min(run_start, axis=1)
    # A shifted window begins up to a window before the run, or ends as far after it.
    margin = (window, window)
    padded_positions = jnp.pad(
        jnp.where(valid, positions, nowhere), ((0, 0), margin), constant_values=nowhere
    )
    tokens = jnp.pad(values.swapaxes(1, 2), ((0, 0), (0, 0), margin, (0, 0)))

    last_page = 0 if isinstance(page_table, Contiguous) else page_table.shape[1] - 1
    windows_per_row = 1 + min(last_page, (count + page_size - 2) // page_size)

    def write_window(index: jax.Array, pages: PageArray) -> PageArray:
        row = index // windows_per_row
        page = jnp.minimum(
            jnp.maximum(start[row], 0) // page_size + index % windows_per_row, last_page
        )
        if isinstance(page_table, Contiguous):
            page_id = page_table.first + row
        else:
            page_id = page_table[row, page]
        page_start = page * page_size
        # Where the run meets this page, shifted so that the whole window lies in it.
        offset = jnp.clip(start[row] - page_start, 0, page_size - window)
        token = page_start + offset - start[row] + window
        window_positions = jax.lax.dynamic_slice(padded_positions, (row, token), (1, window))[0]
        written = window_positions == page_start + offset + jnp.arange(window)
        new = jax.lax.dynamic_slice(tokens, (row, 0, token, 0), (1, heads, window, width))
        origin = (page_id, 0, offset, 0)
        old = jax.lax.dynamic_slice(pages, origin, (1, heads, window, width))
        return jax.lax.dynamic_update_slice(pages, jnp.where(written[:, None], new, old), origin)

    pages = jax.lax.fori_loop(0, batch * windows_per_row, write_window, pages)
    # Row-major as everywhere else, so that XLA copies no pages to change their layout.
    return with_layout_constraint(pages, Layout((0, 1, 2, 3)))


def read_block(
    pages: PageArray,
    page_table: PageTable,
    block: Int32[Array, "B"] | Int32[Array, ""] | int,
    batch: int,
    size: int = BLOCK,
) -> Float[Array, "B kv_heads {size} width"]:
    """Reads positions [block * size, (block + 1) * size) of `batch` rows; `size` divides a page.

    Args:
      block: of all rows, or of each row.
    """
    start = block * size
    _, heads, page_size, width = pages.shape

    def read_row(page_id: jax.Array, offset: jax.Array | int) -> jax.Array:
        origin = (page_id, 0, offset, 0)
        return jax.lax.dynamic_slice(pages, origin, (1, heads, size, width))[0]

    if jnp.ndim(block) == 1:
        page = as_array(page_table, batch)[jnp.arange(batch), start // page_size]
        return decode(jax.vmap(read_row)(page, start % page_size))
    if isinstance(page_table, Contiguous):
        origin = (page_table.first, 0, start, 0)
        return decode(jax.lax.dynamic_slice(pages, origin, (batch, heads, size, width)))
    page = jax.lax.dynamic_index_in_dim(page_table, start // page_size, axis=1, keepdims=False)
    return decode(jax.vmap(lambda page_id: read_row(page_id, start % page_size))(page))


MAX_ENTRIES = 31
"""Most entries of a branch: bits of a path."""


def chain_path(length: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The path along the first `length` tokens of a chain; empty for 0."""
    return (jnp.ones_like(length) << length) - 1


def last_entry(path: Int32[Array, "*shape"]) -> Int32[Array, "*shape"]:
    """The last entry on a path, which is the query's own; -1 if the path is empty."""
    return MAX_ENTRIES - jax.lax.clz(path)


class Scratch(NamedTuple):
    """Keys and values of the tokens of M branches; each branch is a tree of up to `MAX_ENTRIES`
    tokens, in which parents come before children. A chain is such a tree.

    Attributes:
      kv: at [:, :, e, m] entry e of branch m.
      paths: (branch, path) of each query. Bit e of the path is set if the query sees entry e of its
        branch: from the root to the query's own entry, which is the last. Path 0 is a query that
        belongs to no branch and sees no entry.
    """

    kv: Shaped[Array, "B kv_heads entries M width"]
    paths: Int32[Array, "B R 2"]

    def visible(self) -> Bool[Array, "B R _"]:
        """Whether each query sees each entry; entry e of branch m is number e * M + m."""
        entries, branches = self.kv.shape[2:4]
        number = jnp.arange(entries * branches)
        branch, path = self.paths[..., 0:1], self.paths[..., 1:2]
        return (number % branches == branch) & ((path >> number // branches) & 1 == 1)

    def write(
        self, values: Float[Array, "B R kv_heads width"], *, windows: bool = False
    ) -> Scratch:
        """Stores each query's key and value as the last entry on its path.

        Args:
          windows: rewrites all entries instead of using a scatter.
        """
        values = encode(values, self.kv.dtype)
        branch, entry = self.paths[..., 0], last_entry(self.paths[..., 1])
        if windows:
            return self._replace(kv=self._rewritten(values, branch, entry))
        rows = jnp.arange(values.shape[0])[:, None]
        entry = jnp.where(entry < 0, self.kv.shape[2], entry)
        return self._replace(kv=self.kv.at[rows, :, entry, branch].set(values, mode="drop"))

    def _rewritten(
        self,
        values: Shaped[Array, "B R kv_heads width"],
        branch: Int32[Array, "B R"],
        entry: Int32[Array, "B R"],
    ) -> jax.Array:
        entries, branches = self.kv.shape[2:4]
        in_entry = entry[:, None, None] == jnp.arange(entries)[:, None, None]
        matches = in_entry & (branch[:, None, None] == jnp.arange(branches)[:, None])
        query = jnp.argmax(matches, axis=-1)  # [B, entries, M]
        new = jax.vmap(lambda row, index: row[index])(values, query)
        written = jnp.any(matches, axis=-1)[:, None, :, :, None]
        return jnp.where(written, jnp.moveaxis(new, 3, 1), self.kv)
