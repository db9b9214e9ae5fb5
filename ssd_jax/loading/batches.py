"""The batch sizes that programs are made for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ssd_jax.devices.opening.exactness import costs_nothing, rows_can_agree
from ssd_jax.devices.programs.batch_sizes import BatchPlan
from ssd_jax.loading.resolved import Resolved

if TYPE_CHECKING:
    from ssd_jax.models.execution import Execution


_SHORT = 0.5  # seconds of rounds of trials


def target_batches(resolved: Resolved) -> BatchPlan:
    """Batch sizes of the target's programs."""
    config = resolved.config
    at_start = config.batch_sizes != "auto"
    return BatchPlan(config.smaller_batches, at_start, together=resolved.chooses)


def draft_batches(resolved: Resolved, draft: Execution | None = None) -> BatchPlan:
    """Batch sizes of a draft's programs.

    There are none where a bit of q might depend on the batch, and in the bitwise mode a sampled
    text on that. Where the times of rounds decide whether they use the draft, few rounds try it,
    which would not want a size for long enough.

    Args:
      draft: on the target's devices; None is one elsewhere.
    """
    exact, target = resolved.config.exact, resolved.target.model.execution
    bitwise = exact == "bitwise" or (exact == "auto" and costs_nothing(target))
    can_agree = draft is None or (costs_nothing(draft) and rows_can_agree(draft))
    plan = target_batches(resolved) if can_agree or not bitwise else BatchPlan()
    return plan._replace(patience=_SHORT) if resolved.chooses else plan
