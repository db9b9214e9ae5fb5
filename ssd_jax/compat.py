"""Differences between supported JAX versions, and process-wide JAX settings, in one place."""

from __future__ import annotations

from pathlib import Path

import jax


def use_compile_cache(directory: Path) -> None:
    """Keeps compiled programs in `directory`, unless the user's own JAX settings name a cache."""
    if getattr(jax.config, "jax_compilation_cache_dir", None):
        return
    jax.config.update("jax_compilation_cache_dir", str(directory))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def widths_can_agree(compute: str) -> bool:
    """Whether a product of this dtype may give a row the same bits at every number of rows.

    On processors XLA chooses kernels of float32 and int8 products by the number of rows from JAX
    0.11 on: a few rows in hundreds differ in their last bits (0.11.2, 0.12.0.1), too few to be
    found by a look at some. Those of bfloat16 do not, nor did any with 0.10.2.
    """
    return jax.default_backend() != "cpu" or compute == "bfloat16" or jax.__version_info__ < (0, 11)
