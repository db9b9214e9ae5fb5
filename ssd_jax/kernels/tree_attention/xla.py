"""`tree_attention` in plain XLA: one pass over the trunk in fixed blocks, merged with the branches.

All queries of a row share each block of keys, whatever branch they belong to. The running
(maximum, total, weighted sum) of the softmax is rescaled block by block; blocks beyond every
query's `visible` are never read, and a block in which a query sees nothing leaves its state
unchanged to the bit. So a query's result does not depend on its neighbours' lengths, nor, totals
being taken by `row_sum`, on how many queries run together.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch
from ssd_jax.kernels.precision import precision
from ssd_jax.kernels.rows import row_sum

_LOWEST = -1e30


class _Softmax(NamedTuple):
    """Partial softmax-weighted sum over the keys seen so far."""

    maximum: Float32[Array, "B kv_heads Q"]
    total: Float32[Array, "B kv_heads Q 1"]
    output: Float32[Array, "B kv_heads Q head_dim"]  # not normalised


def tree_attention_xla(
    q: Float[Array, "B R heads head_dim"],
    k_pages: PageArray,
    v_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
) -> Float32[Array, "B R heads head_dim"]:
    """See `api.tree_attention`. Products in the pages' dtype, softmax and sums in float32."""
    batch, rows, heads, head_dim = q.shape
    kv_heads = k_pages.shape[1]
    group = heads // kv_heads
    # Query heads of one key/value head become rows of one product: [B, kv_heads, R * group, D].
    grouped = q.reshape(batch, rows, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    grouped = grouped.reshape(batch, kv_heads, rows * group, head_dim)
    seen = jnp.repeat(visible, group, axis=1)
    if rows * group == 1:  # a product of one row rounds in its own way
        grouped, seen = jnp.repeat(grouped, 2, axis=2), jnp.repeat(seen, 2, axis=1)

    def add_block(block: jax.Array, state: _Softmax) -> _Softmax:
        k = kv_pages.read_block(k_pages, page_table, block, batch)
        v = kv_pages.read_block(v_pages, page_table, block, batch)
        position = block * kv_pages.BLOCK + jnp.arange(kv_pages.BLOCK)
        return _accumulate(state, grouped, k, v, position < seen[:, :, None])

    shape = grouped.shape[:-1]
    state = _Softmax(jnp.full(shape, _LOWEST), jnp.zeros((*shape, 1)), jnp.zeros(grouped.shape))
    blocks = (jnp.max(visible) + kv_pages.BLOCK - 1) // kv_pages.BLOCK
    state = jax.lax.fori_loop(0, blocks, add_block, state)
    if scratch is not None:
        state = _add_branches(state, grouped, scratch, group)
    output = state.output / jnp.where(state.total == 0, 1.0, state.total)
    output = output[:, :, : rows * group]
    output = output.reshape(batch, kv_heads, rows, group, head_dim).transpose(0, 2, 1, 3, 4)
    return output.reshape(batch, rows, heads, head_dim)


def _accumulate(
    state: _Softmax,
    q: Float[Array, "B kv_heads Q head_dim"],
    k: Float[Array, "B kv_heads T head_dim"],
    v: Float[Array, "B kv_heads T head_dim"],
    mask: Bool[Array, "B _ T"],
) -> _Softmax:
    """Adds keys under a mask to the running softmax."""
    scale = q.shape[-1] ** -0.5
    product = functools.partial(
        jnp.einsum, precision=precision(k), preferred_element_type=jnp.float32
    )
    scores = product("bhqd,bhtd->bhqt", q.astype(k.dtype), k)
    mask = mask[:, None]
    scores = jnp.where(mask, scores * scale, _LOWEST)
    maximum = jnp.maximum(state.maximum, jnp.max(scores, axis=-1))
    weights = jnp.where(mask, jnp.exp(scores - maximum[..., None]), 0.0)
    rescale = jnp.exp(state.maximum - maximum)[..., None]
    added = product("bhqt,bhtd->bhqd", weights.astype(v.dtype), v)
    return _Softmax(
        maximum, state.total * rescale + row_sum(weights), state.output * rescale + added
    )


def _add_branches(
    state: _Softmax, q: Float[Array, "B kv_heads Q head_dim"], scratch: Scratch, group: int
) -> _Softmax:
    batch, heads, depths, branches, head_dim = scratch.k.shape
    entry = jnp.arange(depths * branches)
    ancestor = jnp.repeat(scratch.ancestor, group, axis=1)
    own_branch = entry % branches == ancestor[..., 0:1]
    mask = own_branch & (entry // branches <= ancestor[..., 1:2])
    shape = (batch, heads, depths * branches, head_dim)
    k = kv_pages.decode(scratch.k).reshape(shape)
    v = kv_pages.decode(scratch.v).reshape(shape)
    return _accumulate(state, q, k, v, mask)
