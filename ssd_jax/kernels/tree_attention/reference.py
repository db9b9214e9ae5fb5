"""`tree_attention` written for reading: materialise every key, mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int32

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch


def tree_attention_reference(
    q: Float[Array, "B R heads head_dim"],
    k_pages: PageArray,
    v_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
) -> Float32[Array, "B R heads head_dim"]:
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


def _rows(
    pages: PageArray, page_table: Int32[Array, "B P"]
) -> Float32[Array, "B kv_heads P*page_size head_dim"]:
    gathered = kv_pages.decode(pages)[page_table].astype(jnp.float32)
    batch, count, heads, size, head_dim = gathered.shape
    return gathered.transpose(0, 2, 1, 3, 4).reshape(batch, heads, count * size, head_dim)


def _branches(
    scratch: Scratch,
) -> tuple[
    Float32[Array, "B kv_heads depths*M head_dim"],
    Float32[Array, "B kv_heads depths*M head_dim"],
    Bool[Array, "B R depths*M"],
]:
    batch, heads, depths, branches, head_dim = scratch.k.shape
    entries = depths * branches
    branch, depth = scratch.ancestor[..., 0:1], scratch.ancestor[..., 1:2]
    entry = jnp.arange(entries)
    mask = (entry % branches == branch) & (entry // branches <= depth)
    shape = (batch, heads, entries, head_dim)
    k = kv_pages.decode(scratch.k).astype(jnp.float32).reshape(shape)
    v = kv_pages.decode(scratch.v).astype(jnp.float32).reshape(shape)
    return k, v, mask
