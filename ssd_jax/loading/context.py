"""How many positions a sequence may have."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ssd_jax.config.config import Config
from ssd_jax.config.settings import DEFAULT_CONTEXT
from ssd_jax.errors import InputError
from ssd_jax.loading.resolved import Resolved


def fitting_context(config: Config, limits: Mapping[str, int], ks: Sequence[int]) -> int:
    """Positions of a sequence: as configured, or the most that all models were made for.

    Args:
      limits: positions that each model was made for, by its source.
      ks: values of K to prepare.

    Raises:
      InputError: more than a model was made for, or too few for a K.
    """
    tightest = min(limits, key=lambda source: limits[source])
    limit = limits[tightest]
    context = config.context or min(DEFAULT_CONTEXT, limit)
    if context > limit:
        raise InputError(
            f"context = {context} is more than the {limit} positions that "
            f"{tightest} was made for; lower `context`"
        )
    max_k = max(ks, default=0)
    if context < 2:
        raise InputError(f"context = {context} has no room for a prompt token and one more")
    if max_k > context - 2:
        raise InputError(
            f"k = {max_k} does not fit a context of {context}, which must "
            "hold a prompt token and a pending one beside; lower `k` or raise `context`"
        )
    return context


def cut_lines(resolved: Resolved) -> list[str]:
    """A line where the draft's context is what makes a default context as short as it is."""
    context, draft = resolved.context, resolved.draft
    target_context = min(DEFAULT_CONTEXT, resolved.target.checkpoint.config.max_context)
    if resolved.config.context is not None or draft is None or context >= target_context:
        return []
    return [
        f"context = {context}, and not {target_context}, since the draft {draft.source} was made "
        f"for no more; `mode='ar'`, another draft or `draft='ngram'` allows more"
    ]
