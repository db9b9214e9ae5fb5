"""Every program of a target and of a draft, as functions and shapes, not compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from jax.sharding import Mesh

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.config.settings import SUPPORT
from ssd_jax.devices.draft_programs import DraftPrograms
from ssd_jax.devices.expansion_programs import ExpansionPrograms
from ssd_jax.devices.paged_programs import Paging
from ssd_jax.devices.program_spec import Compiler, Name, ProgramSpec
from ssd_jax.devices.target_base import Verification
from ssd_jax.devices.target_programs import Programs
from ssd_jax.models.functional import FunctionalModel
from ssd_jax.roles.drafting import Drafting


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """The sizes that programs are made for.

    Attributes:
      slots: B.
      context: most positions of a sequence.
      k: K.
      branches: M.
      paging: see `PagedPrograms`.
    """

    slots: int
    context: int
    k: int
    branches: int
    paging: Paging | None = None


def of_target(model: FunctionalModel, sizes: Sizes) -> dict[Name, ProgramSpec]:
    """Programs that decode without a draft, and programs that verify K tokens."""
    specs: dict[Name, ProgramSpec] = {}
    verification = Verification(widths=(0, sizes.k), support=SUPPORT)
    Programs(
        model,
        slots=sizes.slots,
        context=sizes.context,
        tokens=model.config.vocab_size,
        verification=verification,
        paging=sizes.paging,
        compiler=_recorder(specs),
    )
    return specs


def of_draft(model: FunctionalModel, sizes: Sizes) -> dict[Name, ProgramSpec]:
    """Programs that draft, and programs that branch."""
    specs: dict[Name, ProgramSpec] = {}
    drafting = Drafting(
        k=sizes.k,
        support=SUPPORT,
        rule="ratio",
        branches=sizes.branches,
        predict="noise",
        confident=True,
    )
    compiler = _recorder(specs)
    base = DraftPrograms(
        model,
        slots=sizes.slots,
        context=sizes.context,
        tokens=model.config.vocab_size,
        drafting=drafting,
        paging=sizes.paging,
        compiler=compiler,
    )
    ExpansionPrograms(base, compiler=compiler)
    return specs


def _recorder(specs: dict[Name, ProgramSpec]) -> Compiler:
    """A compiler that only records its specs."""

    def record(
        new_specs: Mapping[Name, ProgramSpec], mesh: Mesh | None, progress: Progress | None
    ) -> Mapping[Name, Any]:
        del mesh, progress
        specs.update(new_specs)
        return dict.fromkeys(new_specs)

    return record
