"""The one attention call of every model, and the choice of its implementation."""

from __future__ import annotations

import jax

from ssd_jax.kernels.kv_pages import PageTable
from ssd_jax.kernels.tree_attention.reference import tree_attention_reference
from ssd_jax.kernels.tree_attention.types import Scratch
from ssd_jax.kernels.tree_attention.xla import tree_attention_xla

BACKENDS = {"reference": tree_attention_reference, "xla": tree_attention_xla}


def tree_attention(
    q: jax.Array,
    k_pages: jax.Array,
    v_pages: jax.Array,
    page_table: PageTable,
    visible: jax.Array,
    scratch: Scratch | None = None,
    *,
    backend: str = "xla",
) -> jax.Array:
    """Softmax attention of R query tokens per row, RoPE already applied, grouped-query heads.

    A query attends to positions [0, visible) of its row's pages (the trunk; forks at different
    depths share it) and, when `scratch` is given, to the tokens of its own branch so far.
    Verification and prefill have no scratch and visible = length + i + 1: a token sees itself,
    its key having been written before.

    Args:
      q: [B, R, heads, head_dim].
      k_pages, v_pages: [pages, kv_heads, page_size, head_dim], storage dtype of `kv_pages`.
      page_table: [B, P] int32 or `kv_pages.Contiguous`.
      visible: [B, R] int32, trunk positions this query sees.
      scratch: branch tokens, or None.
      backend: one of `BACKENDS`.

    Returns: [B, R, heads, head_dim] float32; zeros for a query that sees nothing.
    """
    return BACKENDS[backend](q, k_pages, v_pages, page_table, visible, scratch)
