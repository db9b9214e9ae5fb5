"""What the target's programs of chains and of trees share."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ssd_jax.devices.programs import passes, program_spec
from ssd_jax.devices.programs.batched import BatchedPrograms
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.sampling_rows import SamplingRows
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.models.sharding import DATA_AXIS
from ssd_jax.models.token_tree import AllBranches
from ssd_jax.sampling import proposal
from ssd_jax.sampling.masks import words_of
from ssd_jax.sampling.proposal import Proposal
from ssd_jax.system.new_arrays import zeros


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verification:
    """What `accept` is compiled for.

    Attributes:
      widths: numbers of proposed tokens that a verification may have, ascending, always including
        0. Proposals always have room for the largest.
      support: ids of a proposal's q; 1 for point masses.
      rule: of verification.
      logprobs_of: "raw" or "processed", of log-probabilities.
      nodes: of trees of proposed tokens, whose depth is at most the largest width; 0 is no trees.
    """

    widths: tuple[int, ...] = (0,)
    support: int = 1
    rule: str = "ratio"
    logprobs_of: str = "raw"
    nodes: int = 0

    def blank(self, rows: int) -> Proposal:
        """Room for the widest proposal, nothing proposed."""
        return proposal.blank(rows, self.widths[-1], self.support)


class TargetBase(BatchedPrograms):
    """Shapes and variants of the programs of a target.

    Args:
      others: see `PagedPrograms`.

    Attributes:
      ids: number of ids that exist; logits beyond are vocabulary padding.
      verification: proposals and rule.
    """

    def __init__(
        self,
        model: FunctionalModel,
        slots: int,
        context: int,
        paging: Paging | None,
        ids: int,
        verification: Verification,
    ) -> None:
        super().__init__(model, slots, context, paging, ids, verification)
        self.ids, self.verification = ids, verification

    def logits_of(self, proposed: int) -> jax.ShapeDtypeStruct:
        """Logits [slots * (proposed + 1), V] of a `forward`."""
        shape = self.slots * (proposed + 1), self.model.config.outputs
        logits = jax.ShapeDtypeStruct(shape, jnp.float32)
        axis = passes.over_words(self.model, self.model.rules.outputs)
        return passes.cut(self.model, logits, DATA_AXIS, axis)

    def variants(self, rows: int) -> Sequence[str]:
        """Variants of `accept`, the one that can do everything last.

        One row costs little, and only has that one, unless there is one slot.
        """
        all_variants = self.model.execution.variants
        return all_variants if rows == self.slots else all_variants[-1:]

    def blank_tree(self) -> Proposal:
        """Room for the nodes of a tree of every slot, nothing proposed."""
        return proposal.blank(self.slots, self.verification.nodes, self.verification.support)

    def new_tree_branches(self) -> AllBranches:
        """Zeroed keys and values of the nodes of a tree of every slot."""
        return zeros(self.model.branch_struct(self.slots, self.verification.nodes, 1))

    def masks_struct(self, rows: int, positions: int) -> jax.ShapeDtypeStruct:
        """Masks [rows, positions, mask]; see `sampling.masks`."""
        return program_spec.ints(rows, positions, words_of(self.model.config.vocab_size))

    def accept_structs(self, rows: int, proposed: int, *, masked: bool = False) -> dict[str, Any]:
        """Structs of the arguments of `accept`, by name, for every slot or for one.

        Args:
          masked: whether there are masks of a grammar.
        """
        per_row = {
            "drafted": jax.eval_shape(lambda: self.verification.blank(rows)),
            "sampling": SamplingRows(rows, self.model.config.vocab_size).structs(),
            "start": program_spec.ints(rows),
        }
        if masked:
            per_row["masks"] = self.masks_struct(rows, proposed + 1)
        all_slots = rows == self.slots
        structs = self.structs | (self.by_slots(per_row) if all_slots else per_row)
        structs["slot"] = program_spec.ints()
        if all_slots:
            structs["logits"] = self.logits_of(proposed)
        return structs
