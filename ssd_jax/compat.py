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
