"""`tree_attention` on processors: the handler of `cpu.cc`, called by XLA."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int32

from ssd_jax.kernels.handlers import ATTENTION
from ssd_jax.kernels.kv_pages import PageArray, PageTable, Scratch, as_array
from ssd_jax.kernels.tree_attention.variant import PLAIN, AttentionVariant

POSITIONS = 64
"""Page sizes are multiples of this, the positions that `cpu.cc` takes together."""


def tree_attention_cpu(
    q: Float[Array, "B R heads head_dim"],
    kv_pages: PageArray,
    page_table: PageTable,
    visible: Int32[Array, "B R"],
    scratch: Scratch | None = None,
    variant: AttentionVariant = PLAIN,
    *,
    tiles: bool = True,
) -> Float32[Array, "B R heads head_dim"]:
    """`api.tree_attention`, with scores, softmax and sums in float32.

    q, keys and values enter products in their given types, and weights in float32; weights have 16
    bits if q and pages are bfloat16, head_dim is a multiple of 32, the processor has AMX, and
    `tiles` allows it. A query's bits depend only on the query and what it sees; what it does not
    see may be NaN. Without tiles, its bits are those of a query that sees the tokens on its path in
    the pages, at the positions behind the trunk. Blocks before every query's window are not read.

    Args:
      q: float32 or bfloat16.
      kv_pages: float32, bfloat16, or the bits of bfloat16 as uint16.
      tiles: whether AMX tiles may compute products.
    """
    first = variant.first_seen(visible, scratch)
    sinks = None if variant.sinks is None else variant.sinks.astype(jnp.float32)
    call = jax.ffi.ffi_call(ATTENTION, jax.ShapeDtypeStruct(q.shape, jnp.float32))
    return call(
        *(q, kv_pages, as_array(page_table, len(q)), visible, *(scratch or ())),
        *(array for array in (first, sinks) if array is not None),
        tiles=tiles,
        window=first is not None,
        sinks=sinks is not None,
        scale=np.float32(variant.scale or 0),
        soft_cap=np.float32(variant.soft_cap or 0),
    )
