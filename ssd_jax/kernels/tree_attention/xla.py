"""`tree_attention` in plain XLA: one pass over the trunk in fixed blocks, merged with the branches.

All queries of a row share each block of keys, whatever their branch. The running (maximum, total,
weighted sum) of the softmax is rescaled block by block, and a block in which a query sees nothing
leaves its state unchanged to the bit. So a query's result does not depend on its neighbours'
lengths nor, as `row_sum` takes the totals, on the number of queries that run together.
"""

from __future__ import annotations

import functools
import math
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

STATIC_BLOCK = 4 * BLOCK
"""Positions that `tree_attention_xla_static` reduces at a time, if they divide a page."""

_LOWEST = -1e30


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
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with products in the pages' dtype, softmax and sums in float32.

    Blocks beyond every query's `visible` are never read.
    """
    size = math.gcd(kv_pages.shape[2], BLOCK)
    blocks = (jnp.max(visible) + size - 1) // size
    return _attend(q, kv_pages, page_table, visible, scratch, blocks, size, together=False)


def tree_attention_xla_static(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
) -> Float32[Array, "B R heads head_dim"]:
    """As `tree_attention_xla`, but reads every block within the page table's reach, seen or not: a
    device that would wait for the host at a loop of unknown length does not wait.

    Where a key does not fill whole vectors of a TPU, products take key and value together, with
    zeros in the query for the value: slicing within the lanes would copy every block.
    """
    page_size = kv_pages.shape[2]
    size = math.gcd(page_size, STATIC_BLOCK)
    if isinstance(page_table, Contiguous):
        blocks = (page_table.reach or page_size) // size
    else:
        blocks = page_table.shape[1] * page_size // size
    together = q.shape[-1] % LANES != 0
    return _attend(q, kv_pages, page_table, visible, scratch, blocks, size, together=together)


def _attend(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None,
    blocks: Int32[Array, ""] | int,
    block_size: int,
    *,
    together: bool,
) -> Float32[Array, "B R heads head_dim"]:
    """Attention over the first `blocks` blocks of `block_size` positions.

    Args:
      together: keeps keys and values together in products.
    """
    batch, rows, heads, head_dim = q.shape
    kv_heads = kv_pages.shape[1]
    group = heads // kv_heads
    # Query heads of one key/value head become rows of one product: [B, kv_heads, R * group, D].
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    query_visible = jnp.repeat(visible, group, axis=1)
    if rows * group == 1:  # a product of one row rounds differently
        grouped, query_visible = (
            jnp.repeat(grouped, 2, axis=2),
            jnp.repeat(query_visible, 2, axis=1),
        )
    if together:
        grouped = jnp.pad(grouped, ((0, 0), (0, 0), (0, 0), (0, head_dim)))
    scale = head_dim**-0.5

    def add_block(block: jax.Array | int, state: Softmax) -> Softmax:
        kv = read_block(kv_pages, page_table, block, batch, block_size)
        mask = block * block_size + jnp.arange(block_size) < query_visible[:, :, None]
        return _accumulate(state, grouped, kv, mask, scale)

    shape = grouped.shape[:-1]
    state = Softmax(jnp.full(shape, _LOWEST), jnp.zeros((*shape, 1)), jnp.zeros(grouped.shape))
    state = jax.lax.fori_loop(0, blocks, add_block, state)
    if scratch is not None:
        state = add_branches(state, grouped, scratch, group, scale)
    output = normalise(state)
    output = output[..., -head_dim:][:, :, : rows * group]
    output = output.reshape(batch, kv_heads, rows, group, head_dim).transpose(0, 2, 1, 3, 4)
    output = output.reshape(batch, rows, heads, head_dim)
    return nan_where_invalid(output, in_range(kv_pages, page_table, visible, scratch))


def normalise(state: Softmax) -> Float32[Array, "B kv_heads Q _"]:
    """The weighted mean, or zeros for a query that saw nothing."""
    return state.output / jnp.where(state.total == 0, 1.0, state.total)


def _accumulate(
    state: Softmax,
    q: Float[Array, "B kv_heads Q _"],
    kv: Float[Array, "B kv_heads T width"],
    mask: Bool[Array, "B _ T"],
    scale: float,
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
    scores = jnp.where(mask, scores * scale, _LOWEST)
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
    scale: float,
) -> Softmax:
    """Adds the tokens on each query's path; `group` queries belong to one token."""
    batch, heads, entries, branches, width = scratch.kv.shape
    kv = decode(scratch.kv).reshape(batch, heads, entries * branches, width)
    return _accumulate(state, q, kv, jnp.repeat(scratch.visible(), group, axis=1), scale)
