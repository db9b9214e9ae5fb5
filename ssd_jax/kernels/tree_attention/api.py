"""The one attention call of every model, and the choice of its implementation."""

from __future__ import annotations

from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.handlers import why_missing
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch
from ssd_jax.kernels.tree_attention.cpu import tree_attention_cpu
from ssd_jax.kernels.tree_attention.reference import tree_attention_reference
from ssd_jax.kernels.tree_attention.xla import (
    tree_attention_xla,
    tree_attention_xla_static,
)

BACKENDS = {
    "reference": tree_attention_reference,
    "xla": tree_attention_xla,
    "xla_static": tree_attention_xla_static,
    "cpu": tree_attention_cpu,
}


def in_xla(platform: str) -> str:
    """The backend in plain XLA: where a loop of unknown length costs little, it stops at the
    longest row."""
    return "xla" if platform == "cpu" else "xla_static"


def backend(platform: str, *, devices: int = 1) -> str:
    """ "cpu", or XLA's on other platforms and where `handlers.why_missing` says why not.

    Args:
      platform: JAX's name of it.
      devices: that share the heads of a model.
    """
    compiled = platform == "cpu" and devices == 1 and why_missing() is None
    return "cpu" if compiled else in_xla(platform)


def tree_attention(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    *,
    backend: str = "xla",
) -> Float32[Array, "B R heads head_dim"]:
    """Softmax attention of R query tokens per row, RoPE already applied, grouped-query heads.

    A query attends to positions [0, visible) of its row's pages (the trunk; forks at different
    depths share it) and, when `scratch` is given, to the tokens of its own branch so far.
    Verification and prefill have no scratch and visible = length + i + 1: a token sees itself,
    its key having been written before. A query that sees nothing gets zeros.

    `backend` is one of `BACKENDS`.
    """
    return BACKENDS[backend](q, kv_pages, page_table, visible, scratch)
