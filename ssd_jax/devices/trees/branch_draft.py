"""The draft of SSD with token trees on devices: pages, branches, and what it learns of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import Float32
from typing_extensions import override

from ssd_jax.devices.branches.role import BranchingRole
from ssd_jax.devices.programs import device
from ssd_jax.devices.programs.program_spec import Program
from ssd_jax.devices.trees.draft_programs import TREES, TreeRequest, as_log_rates
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.devices.trees.packed import TreeBranches, UnpackedBranches
from ssd_jax.devices.trees.record_answers import DraftedTrees, TreeRecords
from ssd_jax.devices.trees.role import TreeRole
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import (
    IDLE,
    ExpansionRequest,
    Promotion,
    RecordRequest,
    Row,
    SlotOpening,
)
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.speculation.rank_rates import RankRates, Visit, path_visits


class TreeBranchDraft(TreeRole, BranchingRole):
    """A draft that branches off trees, on the devices of this process. Only what reads waits.

    Args:
      programs, parameters, temperature: see `PagedRole`.
      rates: see `TreeRole`; of depths 0 to K.

    Attributes:
      variants: of the programs.
      support: number of ids that a proposal's q is kept for.
    """

    def __init__(
        self,
        programs: TreeExpansionPrograms,
        parameters: Parameters,
        *,
        rates: RankRates,
        temperature: float | None = None,
    ) -> None:
        super().__init__(programs.base, parameters, temperature, rates=rates)
        self.k, self.branches = programs.shape.depth, programs.branches
        self.support = programs.support
        self.nodes, self.variants = programs.shape.nodes, programs.variants
        self._programs = programs
        self._scratch = programs.new_scratch()
        self._record = programs.new_record()
        self._expansion = programs.new_expansion()
        self._size = programs.local_slots  # batch size of the records
        self._answer: TreeBranches | None = None  # of the expansion of these records
        self._trees: dict[int, _KnownTree] = {}  # of the records that teach ranks, by slot
        self._drafted: Sequence[int] = ()  # slots whose records' trees are to be read
        self._unexpanded = np.zeros(self.slots, bool)  # those of them that no expansion has run

    @override
    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._trees.pop(opening.slot, None)

    @override
    def prefill(self, slot: int, tokens: Sequence[int], offset: int) -> None:
        self._run_prefill(slot, tokens, offset)
        self._start[slot] = IDLE
        self._unexpanded[slot] = False

    @override
    def record(self, request: RecordRequest) -> TreeRecords:
        """Dispatches the promotion, then the trees that are drafted just in time."""
        promotion = request.promotion
        assert promotion.node is not None
        branches = None if self._answer is None else self._answer.unpacked
        self._learn(promotion, branches)
        # A slot that was opened since has no tree whose keys could be moved.
        node = np.where(self._start == IDLE, 0, promotion.node).astype(np.int32)
        *_, proposal = map(self._promote, self._split(promotion._replace(node=node)))
        self._trees = self._known_trees(promotion, branches)
        self._start, self._answer = promotion.position.copy(), None
        self._drafted = np.flatnonzero(request.drafts).tolist()
        if not self._drafted:
            self._unexpanded[:] = False
            return TreeRecords(promotion, proposal if self._rule.ships_q else None)
        drafted = self._draft(promotion, request.drafts, proposal)
        return DraftedTrees(promotion, request.drafts, *drafted)

    def _draft(
        self, promotion: Promotion, drafts: Row, proposal: Proposal
    ) -> tuple[Proposal, jax.Array]:
        """Dispatches trees with paths of up to `drafts` tokens, which become the records.

        Args:
          proposal: of the records that are there.

        Returns: what all slots propose, and its parents.
        """
        assert promotion.node is not None
        rows, again = drafts > 0, self._unexpanded & (drafts > 0)
        self._unexpanded = rows
        self._grow_trees(
            TreeRequest(
                committed=np.full((self.slots, self.k + 1), -1, np.int32),
                last=promotion.before_pending,
                pending=np.where(rows, promotion.pending, 0).astype(np.int32),
                start=np.where(rows, promotion.position, IDLE).astype(np.int32),
                node=np.where(again, promotion.node, 0).astype(np.int32),
                begins=(~again).astype(np.int32),
                limit=drafts.astype(np.int32),
                log_rates=as_log_rates(self._tables()[:, : self.k]),
            )
        )
        self._scratch, self._record, proposal, parents = device.run(
            self._programs[self._programs.batch_name(("adopt_tree",), self._size)],
            self._scratch,
            self._record,
            self._growth,
            self._tree,
            self._grown_keys,
            proposal,
            drafts.astype(np.int32),
        )
        return proposal, parents

    @override
    def expand(self, request: ExpansionRequest) -> TreeBranches:
        log_rates = as_log_rates(self._tables())
        self._unexpanded &= ~request.counts.any(axis=1)
        self._pages, self._scratch, self._record, self._expansion, packed = device.run(
            self._select("expand_tree"),
            *self._text(),
            self._scratch,
            self._record,
            request.counts.astype(np.int32),
            np.tile(np.array(request.share, np.int32), (self.slots, 1)),
            log_rates,
            self._rows.on_device(),
        )
        grow = partial(self._grow, log_rates)
        answer = self._answer = TreeBranches(packed, grow, self._programs.shape)
        for _ in range(1, request.forwards):
            answer.grow()
        answer.begin_read()
        return answer

    def _grow(
        self, log_rates: Float32[np.ndarray, "B depths classes ranks"], depth: int
    ) -> jax.Array:
        """Adds a depth to the trees of all branches; returns the programs' `packed`."""
        self._pages, self._scratch, self._record, self._expansion, packed = device.run(
            self._select("grow_branches"),
            *self._text(),
            self._scratch,
            self._record,
            self._expansion,
            np.int32(depth),
            log_rates,
            self._rows.on_device(),
        )
        return packed

    def _select(self, name: str) -> Program:
        """The cheapest variant for the records' rows, of those that reach behind their branches."""
        programs, end = self._programs, int(self._start.max()) + 2 * self.k + 3
        needed = partial(self._rows.needed, self._start)
        task = programs.batch_name(programs.select_reach((name,), end), self._size)
        return programs.select(task, needed)

    def _promote(self, promotion: Promotion) -> Proposal:
        """Dispatches a promotion; returns the proposal of the new records."""
        programs = self._programs
        self._size = programs.choose_size(promotion.live, TREES)
        self._pages, self._history, self._scratch, self._record, proposal = device.run(
            programs[programs.batch_name(("promote_tree",), self._size)],
            *self._text()[1:],
            self._scratch,
            self._record,
            self._expansion,
            promotion,
        )
        return proposal

    def _learn(self, promotion: Promotion, branches: UnpackedBranches | None) -> None:
        """Counts the ranks of the target's tokens in the trees that were verified."""
        assert promotion.node is not None
        classes = None if branches is None else branches.gap_class[:, -1]
        if self._drafted:
            parents, ranks, known = self._read_learnable()
            for slot in self._drafted:
                if slot in self._trees:  # not opened since
                    self._trees[slot] = _KnownTree(ranks[slot].tolist(), parents[slot].tolist())
            if classes is None:
                classes = known
            classes = np.where(self._unexpanded[:, None], known, classes)
        ended = (self._start != IDLE) & (promotion.position > self._start)
        has_fixed_shape = self._has_fixed_shape
        for slot, tree in self._trees.items():
            is_known = branches is not None or self._unexpanded[slot]
            if classes is None or not is_known or not ended[slot]:
                continue
            if has_fixed_shape[slot]:
                continue
            node, gap_class = int(promotion.node[slot]), classes[slot].tolist()
            visits = path_visits(tree.parents, tree.ranks, gap_class, node)
            if branches is not None and not self._unexpanded[slot] and gap_class[node] >= 0:
                visits[-1] = _with_outcomes(visits[-1], branches, slot, node, promotion)
            self._rates.observe(visits, hot=bool(self._hot[slot]))

    def _known_trees(
        self, promotion: Promotion, branches: UnpackedBranches | None
    ) -> dict[int, _KnownTree]:
        """The trees of new records: those of branches, and those without nodes."""
        trees: dict[int, _KnownTree] = {}
        for slot in np.flatnonzero(promotion.position != IDLE).tolist():
            winner, length = int(promotion.winner[slot]), int(promotion.limit[slot])
            ranks, parents = [-1] * self.nodes, [0] * self.nodes
            if winner >= 0 and branches is not None:
                ranks[:length] = branches.ranks[slot, winner, :length].tolist()
                parents[:length] = branches.parents[slot, winner, :length].tolist()
            elif length:
                continue
            trees[slot] = _KnownTree(ranks, parents)
        return trees


def _with_outcomes(
    visit: Visit, branches: UnpackedBranches, slot: int, node: int, promotion: Promotion
) -> Visit:
    """A visit of the last accepted row, behind which the draft also knows whether t* was a bonus
    token of the branches there."""
    prepared = np.flatnonzero(branches.row[slot, :-1] == node)
    if not prepared.size:
        return visit
    is_bonus = branches.bonus[slot, prepared] == promotion.pending[slot]
    ranks = branches.rank[slot, prepared]
    taken = int(ranks[is_bonus.argmax()]) if is_bonus.any() else None
    return Visit(visit.gap_class, sorted({*visit.children, *ranks.tolist()}), taken)


class _KnownTree(NamedTuple):
    """Ranks of the nodes of a tree among the continuations of their parents; -1 is no node."""

    ranks: Sequence[int]
    parents: Sequence[int]
