"""Makes the chooser of a loaded model, from costs that are known or measured now."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax

from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.programs.lookup import surroundings
from ssd_jax.loading.loaded import Loaded
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS
from ssd_jax.system.cache_dir import costs_cache
from ssd_jax.system.cores import usable_cores
from ssd_jax.system.environment import cpu_affinity, cpu_model, versions
from ssd_jax.tuning.chooser import Chooser
from ssd_jax.tuning.cost_file import CostFile, KnownCosts
from ssd_jax.tuning.measuring import measure, measure_target
from ssd_jax.tuning.review import review_costs
from ssd_jax.tuning.throughput import Guess

_STATED_TOKENS = 512
"""Tokens that a draft's own figure counts for, which is of many texts: one or two of another kind
do not outweigh it, and a mode that they rule out would observe nothing that rules it in again."""
_NO_COST = (
    *("trace", "compile_cache", "compile_cache_secret", "chat_template", "generation_config"),
    *("hosts", "host_timeout"),  # the number of hosts counts
)


def open_chooser(loaded: Loaded) -> Chooser:
    """Measures costs that are not known yet for this machine and these models, or that do not hold
    any more, and chooses.

    Raises:
      SsdError: a draft worker does not answer.
    """
    config, resolved = loaded.config, loaded.resolved
    budgets, context = resolved.budgets, resolved.context
    cache_setting = config.compile_cache
    directory = None if cache_setting == "off" else costs_cache(cache_setting)
    file = CostFile(directory, _cost_key(loaded))
    known = file.read(widths=loaded.programs.widths, budgets=budgets)
    stored = known
    if known is None:
        known = KnownCosts(
            measure(loaded, context), first_guess(resolved.draft, resolved.draft_source)
        )
    else:
        known = review_costs(
            known,
            check=lambda: measure_target(loaded),
            measure=lambda: measure(loaded, context),
        )
    if known != stored:
        file.write(known)
    return Chooser(
        config,
        known,
        budgets=budgets,
        file=file,
        fan_out=resolved.fan_out,
        shares_branches=resolved.placement.layout.parts > 1,
    )


def first_guess(draft: OpenedModel | None, source: str | None = None) -> Guess:
    """The guess before any observation: a draft's own figure.

    Args:
      source: name of a draft that is no model.
    """
    if source is not None and source in TEXT_DRAFTS:
        return Guess(acceptance=TEXT_DRAFTS[source].acceptance)
    acceptance = None if draft is None else draft.checkpoint.acceptance
    return Guess() if acceptance is None else Guess(acceptance=acceptance, stated=_STATED_TOKENS)


def _cost_key(loaded: Loaded) -> dict[str, Any]:
    """Everything that costs and acceptance depend on."""
    device, resolved = jax.devices()[0], loaded.resolved
    settings = dataclasses.asdict(loaded.config) | {
        "draft": resolved.draft_source,
        "dtype": resolved.dtype,
        "draft_dtype": resolved.draft_dtype,
    }
    return {
        "settings": {name: settings[name] for name in settings if name not in _NO_COST},
        "device": [device.platform, device.device_kind, jax.device_count(), jax.process_count()],
        "processor": [cpu_model(), cpu_affinity(), sorted(usable_cores())],  # the draft's, too
        "surroundings": surroundings(device.client),
        "versions": versions(),
        "models": [model and model.identity for model in (resolved.target, resolved.draft)],
        "context": resolved.context,
        "widths": loaded.programs.widths,
        "exact": loaded.exact,
    }
