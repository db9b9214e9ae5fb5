"""Memory of keys and values that is no amount, or that nothing shares."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.errors import InputError


def check(settings: DerivedSettings) -> None:
    """Refuses prefixes in pages that slots do not share, and sizes that are not understood."""
    if settings.prefix_caching and settings.kv_memory is None and settings.page_size is None:
        raise InputError("prefix_caching needs pages that slots share; give kv_memory")
    if settings.kv_share is None:
        settings.kv_bytes  # noqa: B018 (checks)
