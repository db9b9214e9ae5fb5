"""The `model` drafter with token trees: a smaller model with its own pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from typing_extensions import override

from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms, TreeRequest, as_log_rates
from ssd_jax.devices.trees.role import TreeRole
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import IDLE, DraftBatch, Drafted
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.rank_rates import RankRates, path_visits


class TreeDrafter(TreeRole, Drafter):
    """Proposes trees of tokens that a draft model ranks. Every call only dispatches.

    Args:
      programs, parameters, temperature: see `PagedRole`.
      rates, sampled_trees: see `TreeRole`.
      k: most tokens of a path; None is the depth that the programs were compiled for.
      send: moves arrays to the target's devices, where they differ from the draft's.
    """

    on_device = True

    def __init__(
        self,
        programs: TreeDraftPrograms,
        parameters: Parameters,
        *,
        rates: RankRates,
        k: int | None = None,
        temperature: float | None = None,
        sampled_trees: bool = True,
        send: Callable[[Any], Any] | None = None,
    ) -> None:
        super().__init__(
            programs, parameters, temperature, rates=rates, sampled_trees=sampled_trees
        )
        self._depth = programs.shape.depth
        self.k = k or self._depth
        self._send, self._sampled_trees = send, sampled_trees
        self._counted = np.zeros(self.slots, np.int32)  # tokens that the history has counted
        self._proposal: Proposal | None = None

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int, *, last: bool) -> None:
        self._run_prefill(slot, tokens, offset)
        self._counted[slot] = offset + len(tokens)
        self._start[slot] = IDLE

    @override
    def propose(self, batch: DraftBatch) -> Drafted:
        rows, depth = batch.limit > 0, self._depth
        self._learn(batch)
        new = rows & (batch.position >= self._counted)  # those of a failed step come again
        committed = np.full((self.slots, depth + 1), -1, np.int32)
        committed[new, : batch.tokens.shape[1]] = batch.tokens[new]
        self._counted[new] = batch.position[new] + 1
        last = np.zeros(self.slots, np.int32)
        for slot in batch.slots:
            if batch.counts[slot] > 1:
                last[slot] = batch.tokens[slot, batch.counts[slot] - 2]
        request = TreeRequest(
            committed,
            last,
            np.where(rows, batch.pending, 0).astype(np.int32),
            np.where(rows, batch.position, IDLE).astype(np.int32),
            np.where(rows, batch.node, 0).astype(np.int32),
            (self._start < 0).astype(np.int32),
            np.where(rows, batch.limit, 0).astype(np.int32),
            as_log_rates(self._tables()),
        )
        self._grow_trees(request)
        self._start = request.start
        tree = self._tree
        sent = tree.proposal, tree.parents
        proposal, parents = sent if self._send is None else self._send(sent)
        self._proposal = proposal
        has_chain = self._has_fixed_shape & (not self._sampled_trees)
        chains = np.flatnonzero(has_chain).tolist()
        return Drafted(request.limit, proposal.tokens, parents=parents, chains=chains)

    @override
    def proposal(self) -> Any:
        return self._proposal

    def _learn(self, batch: DraftBatch) -> None:
        """Counts the ranks that the target took in the trees whose outcomes a batch has."""
        learns = ~self._has_fixed_shape
        judged = [
            slot
            for slot in batch.slots
            if learns[slot] and 0 <= self._start[slot] < batch.position[slot]
        ]
        if not judged:
            return
        parents, ranks, classes = self._read_learnable()
        for slot in judged:
            visits = path_visits(
                parents[slot].tolist(),
                ranks[slot].tolist(),
                classes[slot].tolist(),
                int(batch.node[slot]),
            )
            self._rates.observe(visits, hot=bool(self._hot[slot]))
