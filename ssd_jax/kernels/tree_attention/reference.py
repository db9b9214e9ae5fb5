"""`tree_attention` written for reading: materialise every key, mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageTable
from ssd_jax.kernels.tree_attention.types import Scratch


def tree_attention_reference(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    visible: jax.Array,
    scratch: Scratch | None = None,
) -> jax.Array:
    """See `api.tree_attention`. Float32 throughout."""
    batch, _, heads, head_dim = q.shape
    if isinstance(page_table, kv_pages.Contiguous):
        page_table = page_table.first + jnp.arange(batch)[:, None]
    k, v = _rows(k_pages, page_table), _rows(v_pages, page_table)
    mask = jnp.arange(k.shape[2])[None, None] < visible[:, :, None]
    if scratch is not None:
        branch_k, branch_v, branch_mask = _branches(scratch)
        k = jnp.concatenate([k, branch_k], axis=2)
        v = jnp.concatenate([v, branch_v], axis=2)
        mask = jnp.concatenate([mask, branch_mask], axis=2)
    group = heads // k.shape[1]
    k, v = jnp.repeat(k, group, axis=1), jnp.repeat(v, group, axis=1)
    scores = jnp.einsum("brhd,bhtd->bhrt", q.astype(jnp.float32), k) * head_dim**-0.5
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -jnp.inf), axis=-1)
    weights = jnp.where(mask[:, None], weights, 0.0)
    return jnp.einsum("bhrt,bhtd->brhd", weights, v)


def _rows(pages: jax.Array, page_table: jax.Array) -> jax.Array:
    """[B, kv_heads, P * page_size, head_dim] float32."""
    gathered = kv_pages.decode(pages)[page_table].astype(jnp.float32)
    batch, count, heads, size, head_dim = gathered.shape
    return gathered.transpose(0, 2, 1, 3, 4).reshape(batch, heads, count * size, head_dim)


def _branches(scratch: Scratch) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, heads, depths, branches, head_dim = scratch.k.shape
    entries = depths * branches
    branch, depth = scratch.ancestor[..., 0:1], scratch.ancestor[..., 1:2]
    entry = jnp.arange(entries)
    mask = (entry % branches == branch) & (entry // branches <= depth)
    shape = (batch, heads, entries, head_dim)
    k = kv_pages.decode(scratch.k).astype(jnp.float32).reshape(shape)
    v = kv_pages.decode(scratch.v).astype(jnp.float32).reshape(shape)
    return k, v, mask
