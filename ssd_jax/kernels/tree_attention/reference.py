"""`tree_attention` written for reading: materialise every key, mask, softmax."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch, as_array, decode
from ssd_jax.kernels.tree_attention.bounds import in_range, nan_where_invalid
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant


def tree_attention_reference(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention` over all keys of a row at once, in float32."""
    heads, head_dim = q.shape[2:]
    kv = _gather_rows(kv_pages, as_array(page_table, len(q)))
    position = jnp.arange(kv.shape[2])
    mask = position[None, None] < visible[:, :, None]
    first = variant.first_seen(visible, scratch)
    if first is not None:
        mask &= position[None, None] >= first[:, :, None]
    in_window = variant.within(scratch)
    if in_window is not None:
        kv = jnp.concatenate([kv, _branch_entries(in_window)], axis=2)
        mask = jnp.concatenate([mask, in_window.visible()], axis=2)
    kv = jnp.where(jnp.any(mask, axis=1)[:, None, :, None], kv, 0.0)  # unseen entries may be NaN
    k, v = jnp.split(jnp.repeat(kv, heads // kv.shape[1], axis=1), 2, axis=-1)
    scores = jnp.einsum("brhd,bhtd->bhrt", q.astype(jnp.float32), k) * variant.scale_for(head_dim)
    scores = jnp.where(mask[:, None], variant.cap(scores), -jnp.inf)
    if variant.sinks is not None:
        sinks = variant.sinks.astype(jnp.float32)[None, :, None, None]
        scores = jnp.append(scores, jnp.broadcast_to(sinks, (*scores.shape[:3], 1)), axis=-1)
    weights = jax.nn.softmax(scores, axis=-1)[..., : mask.shape[2]]
    weights = jnp.where(mask[:, None], weights, 0.0)
    attended = jnp.einsum("bhrt,bhtd->brhd", weights, v)
    return nan_where_invalid(attended, in_range(kv_pages, page_table, visible, scratch, first))


def _gather_rows(
    pages: PageArray, page_table: Int32[Array, "B P"]
) -> Float32[Array, "B kv_heads P*page_size width"]:
    gathered = decode(pages)[page_table].astype(jnp.float32)
    batch, count, heads, size, width = gathered.shape
    return gathered.transpose(0, 2, 1, 3, 4).reshape(batch, heads, count * size, width)


def _branch_entries(scratch: Scratch) -> Float32[Array, "B kv_heads _ width"]:
    batch, heads, entries, branches, width = scratch.kv.shape
    kv = decode(scratch.kv).astype(jnp.float32)
    return kv.reshape(batch, heads, entries * branches, width)
