"""The first run of every program of a draft, which takes far longer than the others."""

from __future__ import annotations

import numpy as np

from ssd_jax.devices.branch_draft import BranchDraft
from ssd_jax.roles.records import SlotOpening, promotion
from ssd_jax.sampling.params import SamplingParams


def run_once(draft: BranchDraft) -> None:
    """Drafts, expands, promotes and follows something in all slots; returns when it is done."""
    lowered = np.ones((draft.slots, draft.k), np.int32)
    everywhere = np.ones(draft.slots, bool)
    for slot in range(draft.slots):
        draft.open(SlotOpening(slot, SamplingParams(temperature=1.0), slot))
        draft.prefill(slot, [0], 0)
    begun, won, given = (promotion(draft.slots, draft.k) for _ in range(3))
    for position, each in enumerate((begun, won, given)):
        each.position[:] = min(position, 1)
    won.winner[:], won.limit[:], given.limit[:] = 0, 1, draft.k
    draft.promote(begun)
    draft.draft(np.full(draft.slots, draft.k, np.int32), lowered=lowered)
    for budget in draft.budgets:
        draft.expand(_counts(draft, budget), follow=~everywhere, lowered=lowered, forwards=2)
        draft.branch_tokens(2)
        draft.promote(won)
        draft.promote(given)
    draft.expand(_counts(draft, draft.branches), follow=everywhere, lowered=lowered, forwards=1)
    draft.branch_tokens(1)


def _counts(draft: BranchDraft, budget: int) -> np.ndarray:
    counts = np.zeros((draft.slots, draft.k + 1), np.int32)
    counts[:, 0], counts[:, draft.k] = budget - 1, 1
    return counts
