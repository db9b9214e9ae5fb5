"""The drafts of engines: of modes sd and ssd, wherever they are placed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import jax

from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.branching_draft import BranchingMenu, branching_draft
from ssd_jax.devices.draft.drafter import ModelDrafter
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.trees.branch_draft import TreeBranchDraft
from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms
from ssd_jax.devices.trees.drafter import TreeDrafter
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.host_branching import HostBranchingDraft
from ssd_jax.placement.host_drafter import HostDrafter
from ssd_jax.placement.submesh import PATIENCE, SubmeshDraft
from ssd_jax.roles.drafting import TreeShape
from ssd_jax.roles.protocols import Drafter
from ssd_jax.roles.records import DraftSetup
from ssd_jax.speculation.controller import Controller, Policies
from ssd_jax.speculation.rank_rates import RankRates
from ssd_jax.speculation.text_drafts import TEXT_DRAFTS, TextDrafter
from ssd_jax.speculation.tuner import FixedTuner, SpeculationPlan, Tuner
from ssd_jax.speculation.waiting import Waiting

if TYPE_CHECKING:
    from ssd_jax.placement.parallel.part import Part
    from ssd_jax.placement.process.placement import DraftWorker
    from ssd_jax.placement.process.workers import DraftWorkers


class InlineDraft(NamedTuple):
    """A draft in the target's process; each part is loaded or compiled at its first use.

    Attributes:
      plain: programs of mode sd, which prepare no branches: of chains, or of trees.
      branching: programs of mode ssd, for each number of branches.
    """

    parameters: Callable[[], list[jax.Array]]
    plain: Callable[[], DraftPrograms | TreeDraftPrograms]
    branching: Callable[[], BranchingMenu]

    def compile(self, mode: str) -> None:
        """Compiles the programs of a mode, sd or ssd, if they are not there yet."""
        (self.branching if mode == "ssd" else self.plain)()


@dataclasses.dataclass(frozen=True, kw_only=True)
class EngineDrafts:
    """Makes drafts from what is loaded.

    Attributes:
      programs: of the target.
      inline, worker, tuner, rank_rates, grows: see `Loaded`.
      custom: gets the drafts that are objects, to be closed in the end.
    """

    resolved: Resolved
    programs: Programs
    inline: InlineDraft | None
    worker: DraftWorker | DraftWorkers | None
    tuner: Callable[[str, int], Tuner] | None
    rank_rates: Callable[[TreeShape], RankRates]
    grows: bool
    custom: list[HostBranchingDraft]

    def plain(self, k: int) -> Drafter:
        """A drafter of mode sd, with empty slots, that proposes up to k tokens."""
        if self.inline is None:
            return self._host_drafter(k)
        programs, parameters = self.inline.plain(), self.inline.parameters()
        options: Any = {
            "k": k,
            "temperature": self.resolved.config.draft_temperature,
            "send": self.programs.model.place,
        }
        if isinstance(programs, TreeDraftPrograms):
            options["rates"] = self.rank_rates(programs.shape)
            # What was chosen by measured times must not show in sampled text.
            options["sampled_trees"] = not self.resolved.config.chooses_tree
            return TreeDrafter(programs, parameters, **options)
        return ModelDrafter(programs, parameters, **options)

    def _host_drafter(self, k: int) -> HostDrafter:
        """A drafter that is an object, or reads the text alone."""
        source, setup = self.resolved.draft_source, self._draft_setup(k)
        width = self.programs.verification.widths[-1]
        if self.resolved.custom.draft is not None:
            return self.resolved.custom.drafter(setup, width)
        assert source is not None
        drafter = TextDrafter(TEXT_DRAFTS[source].make, setup)
        return HostDrafter(drafter, setup, name=source, width=width)

    def _draft_setup(self, k: int, branches: int = 0) -> DraftSetup:
        programs = self.programs
        return DraftSetup(
            slots=programs.slots,
            k=k,
            ids=programs.ids,
            context=programs.context,
            support=programs.verification.support,
            branches=branches,
        )

    def branching(
        self, *, patience: float | None = None
    ) -> BranchDraft | TreeBranchDraft | SubmeshDraft | HostBranchingDraft | Part:
        """A draft of mode ssd where it is placed, with empty slots.

        Args:
          patience: seconds that a round waits for it, if it is elsewhere; None is the usual value.
        """
        if self.worker is not None:
            return self.worker.draft(patience)
        if self.resolved.custom.draft is not None:
            return self._custom_branching()
        assert self.inline is not None
        temperature = self.resolved.config.draft_temperature
        draft = branching_draft(self.inline.branching(), self.inline.parameters(), temperature)
        if self.resolved.placement.kind != "submesh":
            return draft
        return SubmeshDraft(
            draft,
            self.programs.model.place,
            support=draft.support,
            tokens=self.resolved.target.tokenizer.size,
            page_size=0 if self.programs.paging is None else self.programs.paging.size,
            patience=PATIENCE if patience is None else patience,
        )

    def _custom_branching(self) -> HostBranchingDraft:
        k, branches = self.programs.verification.widths[-1], self.resolved.branches
        draft = self.resolved.custom.branching(self._draft_setup(k, branches))
        self.custom.append(draft)
        return draft

    def controller(self, k: int, patience: float | None) -> Controller:
        """A drafter of mode ssd, over `branching`, that proposes up to k tokens."""
        config, resolved = self.resolved.config, self.resolved
        draft = self.branching(patience=patience)
        on_accelerator = self.programs.model.execution.one_array
        # No clock records the work of a draft in this process.
        elsewhere = not isinstance(draft, BranchDraft | TreeBranchDraft | HostBranchingDraft)
        activity = None
        if not isinstance(draft, BranchDraft | TreeBranchDraft | HostBranchingDraft | SubmeshDraft):
            activity = draft.activity
        if self.tuner is None:
            tuner = FixedTuner(SpeculationPlan.of_branches(k, resolved.branches))
        else:
            tuner = self.tuner("ssd", k)
        policies = Policies(
            k=k,
            tuner=tuner,
            fan_out=lambda: resolved.fan_out(k),
            backup=config.backup_kind,
            tokens=self.resolved.target.tokenizer.size,
            lowers=config.saguaro_c not in (None, 1),
            rule=config.verify,
        )
        return Controller(
            draft,
            policies,
            elsewhere=elsewhere,
            # Behind the dispatch a message would wait for cores that the target computes on.
            asks_first=self.worker is not None and not on_accelerator,
            put_off=self.grows,
            waiting=Waiting(activity),
        )
