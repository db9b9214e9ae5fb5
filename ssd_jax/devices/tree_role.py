"""What drafts that propose trees of tokens share: the trees on their devices."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ssd_jax.devices import device
from ssd_jax.devices.paged_role import PagedRole
from ssd_jax.devices.tree_draft_programs import TreeDraftPrograms, TreeRequest
from ssd_jax.devices.tree_growth import Growth, TreeProposal
from ssd_jax.models.functional import Parameters
from ssd_jax.system.stored_jit import create_arrays


class TreeRole(PagedRole):
    """A draft's slots, each with a tree; see `PagedRole`."""

    def __init__(
        self,
        programs: TreeDraftPrograms,
        parameters: Parameters,
        temperature: float | None = None,
    ) -> None:
        super().__init__(programs, parameters, temperature)
        self._tree_programs = programs
        self._growth, self._tree = programs.model.place(create_arrays(self._no_trees))
        self._grown_keys = programs.new_branches()  # keys and values of what was run
        self._learnable: Any = None  # of the trees; see `tree_growth.learnable`

    def _no_trees(self) -> tuple[Growth, TreeProposal]:
        programs = self._tree_programs
        return programs.empty_growth(self.slots), programs.empty_proposal(self.slots)

    def _grow_trees(self, request: TreeRequest) -> None:
        """Dispatches the programs that make the trees of a request."""
        programs, sampling = self._tree_programs, self._rows.on_device()
        needed = partial(self._rows.needed, request.start)
        end = int(request.start.max()) + programs.shape.depth + 1
        begin, grow = (
            programs.select(programs.select_reach((name,), end), needed)
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
