"""Models that do not have what is asked of them."""

from __future__ import annotations

from ssd_jax.checkpoints.weights.native import check_source
from ssd_jax.config.derived import DerivedSettings


def check(settings: DerivedSettings) -> None:
    """Refuses quantised weights as stored of models that store none."""
    check_source(settings.target, settings.dtype)
    check_source(settings.draft_model, settings.draft_dtype)
