"""Loads a worker's draft: programs and weights, shared by the sessions of all its streams."""

from __future__ import annotations

import dataclasses
import functools
import sys
import threading
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax.sharding import Mesh

from ssd_jax.checkpoints.opening import open_checkpoint
from ssd_jax.devices.branches.draft import BranchDraft
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.branching_draft import BranchingMenu, branching_draft, run_once
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.opening.models import OpenedModel, check_paging, open_model
from ssd_jax.devices.programs.batch_sizes import BatchPlan
from ssd_jax.devices.programs.paged import Paging
from ssd_jax.devices.trees.branch_draft import TreeBranchDraft
from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.errors import InputError
from ssd_jax.models.functional import Parameters
from ssd_jax.models.sharding import mesh_of
from ssd_jax.placement.process.memory import check_memory
from ssd_jax.placement.process.server import MakeSession
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.supervisor import WorkerResources
from ssd_jax.system.compile_cache import open_store, use_store
from ssd_jax.system.sums import check_sums
from ssd_jax.wire.draft_spec import DraftSpec

_SWITCH_INTERVAL = 5e-4  # seconds that tracing may keep the interpreter from rounds


def open_draft(
    spec: DraftSpec, resources: WorkerResources, mesh: Mesh | None = None
) -> OpenedModel:
    """Opens a draft, and checks that it is the one that the engine expects.

    Args:
      mesh: the draft's devices; None is the default device.

    Raises:
      InputError: the checkpoint cannot be used or is another, or the attention is not possible.
    """
    target = None if resources.target is None else open_checkpoint(resources.target)
    opened = open_model(
        resources.source,
        spec.dtype,
        attention=spec.attention,
        mesh=mesh,
        page_size=spec.page_size or None,
        context=spec.context,
        target=target,
        tokens=spec.tokens,
    )
    if opened.identity != spec.model:
        raise InputError(
            f"{resources.source} is another draft than the target's side has opened (or has "
            "changed since): name the same files at both ends, and start again"
        )
    return opened


def load_sessions(
    spec: DraftSpec,
    resources: WorkerResources,
    *,
    engines: int = 1,
    copies: int = 1,
    urgent: bool = False,
) -> MakeSession:
    """Compiles and loads a draft, and runs it once, so that the first rounds are not late.

    Args:
      engines, copies: see `check_memory`.
      urgent: see `WorkerSettings`.

    Raises:
      InputError: the checkpoint cannot be used, the devices are not the requested ones, or there
        is too little memory.
    """
    if resources.store is not None:
        use_store(open_store(resources.store))
    check_sums()
    mesh = None
    if resources.devices is not None:
        devices = resources.devices.start()
        mesh = None if resources.devices.is_default else mesh_of(devices)
    opened = open_draft(spec, resources, mesh)
    paging = Paging(spec.page_size, spec.pages) if spec.pages else None
    if paging is not None:
        check_paging(opened.model, paging.size, slots=spec.slots, context=spec.context)
    check = functools.partial(check_memory, opened, spec, engines=engines, copies=copies)
    check()
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(opened.load)
        *smaller_budgets, max_budget = sorted(spec.budgets)
        sizes = {"slots": spec.slots, "context": spec.context, "tokens": spec.tokens}
        common: Any = {**sizes, "drafting": spec.drafting, "paging": paging}
        batches = BatchPlan(spec.batch_sizes, spec.batches_at_start, patience=spec.batch_patience)
        menu: BranchingMenu
        if spec.drafting.tree is None:
            base = DraftPrograms(opened.model, **common, batches=batches, defer=urgent)
            budgets = [max_budget] if urgent else spec.budgets
            menu = ExpansionPrograms.menu(base, budgets, batches=batches)
        else:
            in_turn = spec.drafting.in_turn
            assert in_turn.tree is not None
            trees = TreeDraftPrograms(
                opened.model,
                **common | {"drafting": in_turn},
                shape=in_turn.tree,
                batches=batches,
            )
            of_worker = dataclasses.replace(spec.drafting, branches=spec.branches)
            menu = (TreeExpansionPrograms(trees, of_worker, batches=batches),)
            urgent = False
        check(programs=max(programs.working_memory for programs in menu))
        parameters = loading.result()
    drafts = _Drafts(menu, parameters, spec.draft_temperature)
    if urgent:
        threading.Thread(target=drafts.extend, args=(smaller_budgets,), daemon=True).start()
    return lambda round_waits: DraftSession(spec, drafts.new, round_waits)


class _Drafts:
    """Makes drafts from a menu of programs, which may grow if they are of chains."""

    def __init__(
        self, menu: BranchingMenu, parameters: Parameters, temperature: float | None
    ) -> None:
        self._menu, self._parameters, self._temperature = menu, parameters, temperature
        self._lock = threading.Lock()
        self._drafts: weakref.WeakSet[BranchDraft | TreeBranchDraft] = weakref.WeakSet()
        self._warm = [self._new_draft(menu)]
        run_once(self._warm[0])

    def new(self) -> BranchDraft | TreeBranchDraft:
        """A draft with empty slots."""
        with self._lock:
            draft = self._warm.pop() if self._warm else self._new_draft(self._menu)
            self._drafts.add(draft)
            return draft

    def extend(self, budgets: Sequence[int]) -> None:
        """Adds programs that load late: just-in-time drafts, and these numbers of branches."""
        sys.setswitchinterval(_SWITCH_INTERVAL)
        first = self._menu[0]
        assert isinstance(first, ExpansionPrograms)
        menu = [first]
        first.base.complete()
        if not budgets:
            run_once(self._new_draft((first,)))
        for branches in reversed(budgets):
            programs = ExpansionPrograms(first.base, branches, first, first.batches)
            run_once(self._new_draft((programs,)))
            menu.append(programs)
            with self._lock:
                self._menu = tuple(menu)
                for draft in (*self._warm, *self._drafts):
                    assert isinstance(draft, BranchDraft)
                    draft.extend(programs)

    def _new_draft(self, menu: BranchingMenu) -> BranchDraft | TreeBranchDraft:
        return branching_draft(menu, self._parameters, self._temperature)
