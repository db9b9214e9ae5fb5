"""Makes drafts that branch, off chains or off trees, and runs their programs for the first time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.trees.branch_draft import TreeBranchDraft
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import (
    ExpansionRequest,
    RecordRequest,
    SlotOpening,
    no_promotion,
    record_request,
)
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.rank_rates import RankRates

BranchingMenu = tuple[ExpansionPrograms, ...] | tuple[TreeExpansionPrograms]
"""Programs for each number of branches; trees have them for one."""


_SETTINGS = {
    "any": SamplingParams(temperature=1.0),
    "greedy": SamplingParams(),
    "sampled": SamplingParams(temperature=1.0),
    "truncated": SamplingParams(temperature=1.0, top_p=0.9),
    "full": SamplingParams(temperature=1.0, repetition_penalty=1.1),
}
"""Settings of requests that need each variant of the programs."""


def branching_draft(
    menu: BranchingMenu, parameters: Parameters, temperature: float | None = None
) -> BranchDraft | TreeBranchDraft:
    """A draft with empty slots that branches off what its programs make; see `PagedRole`."""
    first, *_ = menu
    if isinstance(first, TreeExpansionPrograms):
        rates = RankRates(first.shape)
        return TreeBranchDraft(first, parameters, rates=rates, temperature=temperature)
    chains = cast("Sequence[ExpansionPrograms]", menu)
    return BranchDraft(chains, parameters, temperature=temperature)


def run_once(draft: BranchDraft | TreeBranchDraft) -> None:
    """Runs the programs of short texts once, since a first run takes far longer than later ones.

    It drafts, expands, promotes and follows something in all slots, and returns when that is done.
    Programs of wider chunks, of longer texts and of shared pages first run in rounds.
    """
    if isinstance(draft, BranchDraft):
        _run_chains(draft)
    else:
        _run_trees(draft)


def _run_trees(draft: TreeBranchDraft) -> None:
    begin, hit = (no_promotion(draft.slots, draft.k, nodes=draft.nodes) for _ in range(2))
    begin.position[:], hit.position[:], hit.winner[:], hit.limit[:] = 0, 1, 0, 1
    counts = np.full((draft.slots, draft.k + 1), draft.branches, np.int32)
    lowered, nowhere = np.zeros((draft.slots, draft.k), np.int32), np.zeros(draft.slots, bool)
    for variant in draft.variants:
        for slot in range(draft.slots):
            draft.open(SlotOpening(slot, _SETTINGS[variant], slot))
            draft.prefill(slot, [0], 0)
        draft.record(RecordRequest(begin, np.full(draft.slots, draft.k, np.int32), lowered))
        for promotion in (begin, hit):
            draft.record(record_request(promotion))
            draft.expand(ExpansionRequest(counts, nowhere, lowered, forwards=2)).branches(2)


def _run_chains(draft: BranchDraft) -> None:
    lowered = np.ones((draft.slots, draft.k), np.int32)
    everywhere = np.ones(draft.slots, bool)
    begin, hit, backup = (no_promotion(draft.slots, draft.k) for _ in range(3))
    for position, promotion in enumerate((begin, hit, backup)):
        promotion.position[:] = min(position, 1)
    hit.winner[:], hit.limit[:], backup.limit[:] = 0, 1, draft.k
    drafts = np.full(draft.slots, draft.k, np.int32)
    for variant in draft.variants:
        for slot in range(draft.slots):
            draft.open(SlotOpening(slot, _SETTINGS[variant], slot))
            draft.prefill(slot, [0], 0)
        draft.record(RecordRequest(begin, drafts, lowered))
        for budget in draft.budgets:
            counts = _counts(draft, budget)
            draft.expand(ExpansionRequest(counts, ~everywhere, lowered, forwards=2)).branches(2)
            draft.record(record_request(hit))
            draft.record(record_request(backup))
        counts = _counts(draft, draft.branches)
        draft.expand(ExpansionRequest(counts, everywhere, lowered, forwards=1)).branches(1)


def _counts(draft: BranchDraft, budget: int) -> np.ndarray:
    counts = np.zeros((draft.slots, draft.k + 1), np.int32)
    counts[:, 0], counts[:, draft.k] = budget - 1, 1
    return counts
