"""The first run of every program of a draft, which takes far longer than the others."""

from __future__ import annotations

import numpy as np

from ssd_jax.runtime.branch_draft import BranchDraft
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.runtime.roles import Moved


def run_once(draft: BranchDraft) -> None:
    """Drafts, expands, promotes and follows something in all slots; returns when it is done."""
    slots = range(draft.slots)
    lowered = np.ones((draft.slots, draft.k), np.int32)
    everywhere = np.ones(draft.slots, bool)
    for slot in slots:
        draft.open(slot, SamplingParams(temperature=1.0), slot, [], 0)
        draft.prefill(slot, [0], 0)
    draft.move([Moved(slot=slot, position=0, pending=0) for slot in slots])
    draft.draft(np.full(draft.slots, draft.k, np.int32), lowered=lowered)
    for budget in draft.budgets:
        draft.expand(_counts(draft, budget), follow=~everywhere, lowered=lowered, forwards=2)
        draft.news(2)
        draft.move([Moved(slot=slot, position=1, pending=0, winner=0, limit=1) for slot in slots])
        given = [0] * draft.k
        draft.move([Moved(slot=slot, position=1, pending=0, tokens=given) for slot in slots])
    draft.expand(_counts(draft, draft.branches), follow=everywhere, lowered=lowered, forwards=1)
    draft.news(1)


def _counts(draft: BranchDraft, budget: int) -> np.ndarray:
    counts = np.zeros((draft.slots, draft.k + 1), np.int32)
    counts[:, 0], counts[:, draft.k] = budget - 1, 1
    return counts
