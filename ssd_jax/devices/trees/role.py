"""What drafts that propose trees of tokens share: the trees on their devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from jaxtyping import Bool, Float32
from typing_extensions import override

from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.programs import device
from ssd_jax.devices.trees.draft_programs import TREES, TreeDraftPrograms, TreeRequest
from ssd_jax.devices.trees.growth import Growth, TreeProposal
from ssd_jax.models.functional import Parameters
from ssd_jax.roles.records import IDLE, SlotOpening
from ssd_jax.sampling.rules import RULES
from ssd_jax.speculation.fixed_rates import fixed_rates
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.system.new_arrays import create_arrays


class TreeRole(PagedRole):
    """A draft's slots, each with a tree; see `PagedRole`.

    Args:
      rates: how often a target's token has a rank; learned from the outcomes. They shape the trees
        of all rows but sampled ones whose rule compares p with q: those have a fixed shape.
      sampled_trees: whether these have trees; False gives them chains, whose text does not depend
        on the number of nodes.
    """

    def __init__(
        self,
        programs: TreeDraftPrograms,
        parameters: Parameters,
        temperature: float | None = None,
        *,
        rates: RankRates,
        sampled_trees: bool = True,
    ) -> None:
        super().__init__(programs, parameters, temperature)
        self._rates, self._rule = rates, RULES[programs.drafting.rule]
        self._fixed_rates = fixed_rates(programs.shape, trees=sampled_trees)[0]
        self._hot = np.zeros(self.slots, bool)
        self._start = np.full(self.slots, IDLE, np.int32)
        """Positions of the pending tokens of the last trees."""
        self._tree_programs = programs
        self._growth, self._tree = programs.model.place(create_arrays(self._no_trees))
        self._grown_keys = programs.new_branches()  # keys and values of what was run
        self._learnable: Any = None  # of the trees; see `growth.learnable`

    def _no_trees(self) -> tuple[Growth, TreeProposal]:
        programs = self._tree_programs
        return programs.empty_growth(self.slots), programs.empty_proposal(self.slots)

    @override
    def open(self, opening: SlotOpening) -> None:
        super().open(opening)
        self._start[opening.slot] = IDLE
        self._hot[opening.slot] = opening.params.temperature > 0

    @property
    def _has_fixed_shape(self) -> Bool[np.ndarray, "B"]:
        """Rows whose trees may not depend on what was drawn."""
        return self._hot & (not self._rule.keyed_by_position)

    def _tables(self) -> Float32[np.ndarray, "B depths classes ranks"]:
        """The rates that shape each row's trees."""
        tables = self._rates.tables(self._hot)
        tables[self._has_fixed_shape] = self._fixed_rates
        return tables

    def _grow_trees(self, request: TreeRequest) -> None:
        """Dispatches the programs that make the trees of a request."""
        programs, sampling = self._tree_programs, self._rows.on_device()
        needed = partial(self._rows.needed, request.start)
        end = int(request.start.max()) + programs.shape.depth + 1
        size = programs.choose_size(request.start >= 0, TREES)
        begin, grow = (
            programs.select(programs.batch_name(programs.select_reach((name,), end), size), needed)
            for name in ("begin_tree", "grow_tree")
        )

        def run() -> None:
            keys, trees = self._grown_keys, (self._growth, self._tree)
            self._pages, self._history, self._growth, self._tree, self._learnable = begin(
                *self._text(), *trees, keys, request, sampling
            )
            for index in range(1, int(request.limit.max())):
                self._pages, self._grown_keys, self._growth, self._tree, self._learnable = grow(
                    *self._text(),
                    self._growth,
                    self._grown_keys,
                    np.int32(index),
                    request.log_rates,
                    sampling,
                )

        device.run(run)
        device.begin_read(self._learnable)

    def _read_learnable(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Waits for parents and ranks of the nodes, and gap classes of the rows, of all slots."""
        nodes = self._tree_programs.shape.nodes
        learnable = device.read(self._learnable)
        parents, ranks, classes = np.split(learnable, [nodes, 2 * nodes], axis=1)
        return parents, ranks, classes
