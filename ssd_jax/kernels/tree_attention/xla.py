"""`tree_attention` in plain XLA: one pass over the trunk in fixed blocks, merged with the branches.

All queries of a row share each block of keys, whatever their branch. The running (maximum, total,
weighted sum) of the softmax is rescaled block by block, and a block in which a query sees nothing
leaves its state unchanged to the bit. So a query's result does not depend on its neighbours'
lengths nor, as `row_sum` takes the totals, on the number of queries that run together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ssd_jax.kernels.kv_pages import (
    BLOCK,
    LANES,
    Contiguous,
    PageArray,
    PageTable,
    Scratch,
    decode,
    read_block,
)
from ssd_jax.kernels.precision import precision
from ssd_jax.kernels.rows import row_sum
from ssd_jax.kernels.tree_attention.bounds import in_range, nan_where_invalid
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

STATIC_BLOCK = 4 * BLOCK
"""Positions that `tree_attention_xla_static` reduces at a time, if they divide a page."""

_LOWEST = -1e30

Score = Callable[[jax.Array], jax.Array]
"""From products of queries with keys to scores."""


class Blocks(NamedTuple):
    """The blocks of positions that are reduced.

    Attributes:
      size: positions of a block.
      start, end: the first block, and the one behind the last.
      skipped: number of blocks of each row before these; None is 0.
    """

    size: int
    start: Int32[Array, ""] | int
    end: Int32[Array, ""] | int
    skipped: Int32[Array, "B"] | None = None


class Softmax(NamedTuple):
    """Partial softmax-weighted sum over the keys seen so far."""

    maximum: Float32[Array, "B kv_heads Q"]
    total: Float32[Array, "B kv_heads Q 1"]
    output: Float32[Array, "B kv_heads Q _"]  # not normalised


def tree_attention_xla(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with products in the pages' dtype, softmax and sums in float32.

    Blocks beyond every query's `visible`, or before every query's window, are never read.
    """
    size = math.gcd(kv_pages.shape[2], BLOCK)
    end = (jnp.max(visible) + size - 1) // size
    first = variant.first_seen(visible, scratch)
    start = 0 if first is None else jnp.min(first) // size
    blocks = Blocks(size, start, end)
    return _attend(q, kv_pages, page_table, visible, scratch, variant, blocks, together=False)


def tree_attention_xla_static(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
) -> Float32[Array, "B R heads head_dim"]:
    """As `tree_attention_xla`, but reads every block within the page table's reach, seen or not: a
    device that would wait for the host at a loop of unknown length does not wait.

    Under a window that is no array, it reads as many blocks as a row's queries see if they lie no
    further apart than their number, or than a branch has entries and two; one that sees more gets
    NaN.

    Where a key does not fill whole vectors of a TPU, products take key and value together, with
    zeros in the query for the value: slicing within the lanes would copy every block.
    """
    page_size = kv_pages.shape[2]
    size = math.gcd(page_size, STATIC_BLOCK)
    if isinstance(page_table, Contiguous):
        end = (page_table.reach or page_size) // size
    else:
        end = page_table.shape[1] * page_size // size
    together, blocks = q.shape[-1] % LANES != 0, Blocks(size, 0, end)
    first = variant.first_seen(visible, scratch)
    if first is not None and isinstance(variant.window, int):
        apart = max(q.shape[1], 0 if scratch is None else scratch.kv.shape[2] + 2)
        count = 1 + -(-(variant.window + apart) // size)
        if count < end:
            skipped = jnp.clip(jnp.min(first, axis=1) // size, 0, end - count)
            blocks = Blocks(size, 0, count, skipped)
    return _attend(q, kv_pages, page_table, visible, scratch, variant, blocks, together=together)


def _attend(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None,
    variant: AttentionVariant,
    blocks: Blocks,
    *,
    together: bool,
) -> Float32[Array, "B R heads head_dim"]:
    """Attention over some blocks of positions.

    Args:
      together: keeps keys and values together in products.
    """
    batch, rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    # Query heads of one key/value head become rows of one product: [B, kv_heads, R * group, D].
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    first = variant.first_seen(visible, scratch)
    copies = 2 if rows * group == 1 else group  # a product of one row rounds differently
    query_visible = jnp.repeat(visible, copies, axis=1)
    query_first = None if first is None else jnp.repeat(first, copies, axis=1)
    if rows * group == 1:
        grouped = jnp.repeat(grouped, 2, axis=2)
    if together:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, head_dim)))

    def add_block(block: jax.Array | int, state: Softmax) -> Softmax:
        block = block if blocks.skipped is None else blocks.skipped + block
        kv = read_block(kv_pages, page_table, block, batch, blocks.size)
        start = block * blocks.size
        if blocks.skipped is not None:
            start = jnp.expand_dims(start, (1, 2))
        position = start + jnp.arange(blocks.size)
        mask = position < query_visible[:, :, None]
        if query_first is not None:
            mask &= position >= query_first[:, :, None]
        return _accumulate(state, grouped, kv, mask, score)

    def score(products: jax.Array) -> jax.Array:
        return variant.cap(products * variant.scale_for(head_dim))

    state = jax.lax.fori_loop(blocks.start, blocks.end, add_block, _empty(grouped, variant))
    in_window = variant.within(scratch)
    if in_window is not None:
        state = add_branches(state, grouped, in_window, group, score)
    output = normalise(state)
    output = output[..., -head_dim:][:, :, : rows * group]
    output = output.reshape(batch, kv_heads, rows, group, head_dim).transpose(0, 2, 1, 3, 4)
    output = output.reshape(batch, rows, heads, head_dim)
    valid = in_range(kv_pages, page_table, visible, scratch, first)
    if blocks.skipped is not None:
        valid &= visible <= (blocks.skipped[:, None] + blocks.end) * blocks.size
    return nan_where_invalid(output, valid)


def _empty(q: Float[Array, "B kv_heads Q _"], variant: AttentionVariant) -> Softmax:
    """The softmax of no keys but the sinks."""
    shape, sinks = q.shape[:-1], variant.tiled_sinks(*q.shape[1:3])
    if sinks is None:
        return Softmax(jnp.full(shape, _LOWEST), jnp.zeros((*shape, 1)), jnp.zeros(q.shape))
    return Softmax(jnp.broadcast_to(sinks, shape), jnp.ones((*shape, 1)), jnp.zeros(q.shape))


def normalise(state: Softmax) -> Float32[Array, "B kv_heads Q _"]:
    """The weighted mean, or zeros for a query that saw nothing."""
    return state.output / jnp.where(state.total == 0, 1.0, state.total)


def _accumulate(
    state: Softmax,
    q: Float[Array, "B kv_heads Q _"],
    kv: Float[Array, "B kv_heads T width"],
    mask: Bool[Array, "B _ T"],
    score: Score,
) -> Softmax:
    """Adds keys under a mask to the running softmax; `q` is as wide as a key, or as key and value.

    Entries that no query sees may be NaN, left by an earlier request.
    """
    k, v = kv[..., : q.shape[-1]], kv[..., -q.shape[-1] :]
    v = jnp.where(jnp.any(mask, axis=1)[:, None, :, None], v, jnp.zeros((), v.dtype))
    product = functools.partial(
        jnp.einsum, precision=precision(kv), preferred_element_type=jnp.float32
    )
    scores = product("bhqd,bhtd->bhqt", q.astype(k.dtype), k)
    mask = mask[:, None]
    scores = jnp.where(mask, score(scores), _LOWEST)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - maximum[..., None]), 0.0)
    rescale = jnp.exp(state.maximum - maximum)[..., None]
    block_output = product("bhqt,bhtd->bhqd", weights.astype(v.dtype), v)
    return Softmax(
        maximum, state.total * rescale + row_sum(weights), state.output * rescale + block_output
    )


def add_branches(
    state: Softmax,
    q: Float[Array, "B kv_heads Q _"],
    scratch: Scratch,
    group: int,
    score: Score,
) -> Softmax:
    """Adds the tokens on each query's path; `group` queries belong to one token."""
    batch, heads, entries, branches, width = scratch.kv.shape
    kv = decode(scratch.kv).reshape(batch, heads, entries * branches, width)
    return _accumulate(state, q, kv, jnp.repeat(scratch.visible(), group, axis=1), score)
