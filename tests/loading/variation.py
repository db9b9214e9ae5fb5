"""Loaded models with other settings, and settings resolved without any model."""

from __future__ import annotations

import dataclasses
from typing import Any

from ssd_jax.config.config import Config
from ssd_jax.loading.loaded import Loaded
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.placement import Placement


def varied(loaded: Loaded, **settings: Any) -> Loaded:
    """The same programs and parameters with other settings, which no program may depend on."""
    config = dataclasses.replace(loaded.config, **settings)
    budgets = config.budgets_at(loaded.resolved.placement.kind)
    resolved = dataclasses.replace(loaded.resolved, config=config, budgets=budgets)
    return dataclasses.replace(loaded, resolved=resolved)


def resolved_of(config: Config, *, target: Any = None, context: int = 64) -> Resolved:
    """What follows from settings alone, with the draft in the target's process."""
    return Resolved(
        config=config,
        placement=Placement(kind="inline"),
        target=target,
        draft=None,
        draft_source=config.draft,
        dtype=config.dtype,
        draft_dtype=None,
        ks=(config.speculated,),
        budgets=config.budgets_at(),
        context=context,
    )
