"""Every program of a target and of a draft, as functions and shapes, not compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.config.settings import SUPPORT
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.programs.batch_sizes import BatchPlan
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.programs.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting, TreeShape
from ssd_jax.sampling.rules import RuleName

_TREE_RULE: RuleName = "coupled"
"""Of trees: they ship no q."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that programs are made for.

    Attributes:
      slots: B.
      context: most positions of a sequence.
      k: K.
      branches: M.
      nodes: m of trees, of depth K, beside chains; 0 is none.
      paging: see `PagedPrograms`.
      batches: of how many slots there are programs, besides all.
    """

    slots: int
    context: int
    k: int
    branches: int
    nodes: int = 0
    paging: Paging | None = None
    batches: tuple[int, ...] = ()

    @property
    def tree(self) -> TreeShape:
        """The size of the trees."""
        return TreeShape(nodes=self.nodes, depth=self.k)


def of_target(model: FunctionalModel, sizes: Sizes) -> dict[Name, ProgramSpec]:
    """Programs that decode without a draft, and programs that verify K tokens, or trees."""
    specs: dict[Name, ProgramSpec] = {}
    common = _common(model, sizes)
    verification = Verification(widths=(0, sizes.k), support=SUPPORT)
    Programs(model, verification=verification, compiler=_recorder(specs), **common)
    if sizes.nodes:
        trees = Verification(widths=(0, sizes.k), rule=_TREE_RULE, nodes=sizes.nodes)
        tree_specs: dict[Name, ProgramSpec] = {}
        Programs(model, verification=trees, compiler=_recorder(tree_specs), **common)
        specs |= {name: spec for name, spec in tree_specs.items() if name not in specs}
    return specs


def of_draft(model: FunctionalModel, sizes: Sizes) -> dict[Name, ProgramSpec]:
    """Programs that draft chains or trees, and programs that branch."""
    specs: dict[Name, ProgramSpec] = {}
    common = _common(model, sizes)
    if sizes.nodes:
        trees = Drafting(k=sizes.k, support=SUPPORT, rule=_TREE_RULE)
        compiler = _recorder(specs)
        base = TreeDraftPrograms(
            model, drafting=trees, shape=sizes.tree, compiler=compiler, **common
        )
        trees = dataclasses.replace(trees, branches=sizes.branches, nodes=sizes.nodes)
        TreeExpansionPrograms(base, trees, batches=common["batches"], compiler=compiler)
    drafting = Drafting(
        k=sizes.k,
        support=SUPPORT,
        rule="ratio",
        branches=sizes.branches,
        predict="noise",
        confident=True,
    )
    compiler = _recorder(specs)
    base = DraftPrograms(model, drafting=drafting, compiler=compiler, **common)
    ExpansionPrograms(base, batches=common["batches"], compiler=compiler)
    return specs


def _common(model: FunctionalModel, sizes: Sizes) -> dict[str, Any]:
    """What programs of either role have room for."""
    return {
        "slots": sizes.slots,
        "context": sizes.context,
        "tokens": model.config.vocab_size,
        "paging": sizes.paging,
        "batches": BatchPlan(sizes.batches, at_start=True),
    }


def _recorder(specs: dict[Name, ProgramSpec]) -> Compiler:
    """A compiler that only records its specs."""

    def record(
        new_specs: Mapping[Name, ProgramSpec], mesh: Mesh | None, progress: Progress | None
    ) -> Mapping[Name, Any]:
        del mesh, progress
        specs.update(new_specs)
        return dict.fromkeys(new_specs)

    return record
