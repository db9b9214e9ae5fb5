"""The one call that writes keys and values to pages, and the choice of its implementation."""

from __future__ import annotations

from jaxtyping import Array, Int32, Shaped

from ssd_jax.kernels import kv_pages
from ssd_jax.kernels.head_shards import Kernels
from ssd_jax.kernels.kv_pages import PageArray, PageTable


def write(
    pages: PageArray,
    page_table: PageTable,
    positions: Int32[Array, "B R"],
    values: Shaped[Array, "B R kv_heads width"],
    *,
    windows: bool = False,
    kernels: Kernels | None = None,
) -> PageArray:
    """Writes the key and value of each token; arguments as of `kv_pages.write`.

    Args:
      kernels: given if a Pallas kernel reads the pages; a Pallas kernel then writes them, too. An
        XLA scatter next to one would copy all pages into another layout and back.
    """
    if kernels is None:
        return kv_pages.write(pages, page_table, positions, values, windows=windows)
    from ssd_jax.kernels.kv_write_tpu import write_tpu

    how = {"shards": kernels.shards, "interpret": kernels.interpret}
    return write_tpu(pages, page_table, positions, values, **how)
