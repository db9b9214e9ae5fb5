"""Loading: weights load while programs compile, and a draft elsewhere while the target loads."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from ssd_jax.checkpoints.weights.tensors import Progress
from ssd_jax.devices.branches.expansion_programs import ExpansionPrograms
from ssd_jax.devices.branching_draft import BranchingMenu
from ssd_jax.devices.draft.programs import DraftPrograms
from ssd_jax.devices.opening.fallbacks import find_fallbacks
from ssd_jax.devices.opening.models import OpenedModel
from ssd_jax.devices.target.base import Verification
from ssd_jax.devices.target.programs import Programs
from ssd_jax.devices.trees.draft_programs import TreeDraftPrograms
from ssd_jax.devices.trees.expansion_programs import TreeExpansionPrograms
from ssd_jax.errors import SsdError
from ssd_jax.loading.batches import draft_batches, target_batches
from ssd_jax.loading.drafts import InlineDraft
from ssd_jax.loading.loaded import Loaded
from ssd_jax.loading.resolved import Resolved
from ssd_jax.placement.hosts.connect import connect
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.placement import Placement
from ssd_jax.placement.process.supervisor import WorkerResources, WorkerSettings
from ssd_jax.roles.drafting import Drafting
from ssd_jax.sampling.rules import RULES
from ssd_jax.system.cores import deal
from ssd_jax.system.sums import check_sums
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.security import ENGINE_SETTINGS

if TYPE_CHECKING:
    from ssd_jax.placement.process.placement import DraftWorker
    from ssd_jax.placement.process.workers import DraftWorkers
    from ssd_jax.system.compile_cache import ProgramStore

Status = Callable[[str], None]
"""Called with the current step of loading, such as "compiling target: 5 of 9 programs"."""


def load(
    resolved: Resolved,
    *,
    store: ProgramStore | None = None,
    draft_cores: tuple[int, ...] | None = None,
    hosts: Leader | Follower | None = None,
    progress: Progress | None = None,
    status: Status | None = None,
) -> Loaded:
    """Compiles all programs while the weights load.

    Args:
      store: where a draft in a process of its own keeps compiled programs.
      draft_cores: of such a draft.
      hosts: see `Loaded`.
      progress: of the target's weights.
      status: see `Status`.

    Raises:
      InputError: tensor data that cannot be read, or a draft worker that cannot start.
      SsdError: JAX computes wrong sums here.
    """
    status = status or (lambda _line: None)
    check_sums()
    draft, placement, worker = resolved.draft, resolved.placement, None
    with ThreadPoolExecutor(1) as pool, ExitStack() as on_failure:
        if draft is not None and placement.out_of_process and not isinstance(hosts, Follower):
            worker = _make_workers(_worker_settings(resolved, draft, store), resolved, draft_cores)
            on_failure.callback(worker.close)
            worker.start()
        loading = pool.submit(resolved.target.load, _stop_on_failure(on_failure, progress))
        inline = None
        if draft is not None:
            weights = draft.load if placement.out_of_process else pool.submit(draft.load).result
            inline = _inline(resolved, draft, weights, status, store)
        programs = _target_programs(resolved, status)
        if worker is not None:
            worker.check()
        if inline is not None and not placement.out_of_process:
            inline.compile(resolved.config.prepared)
            inline.parameters()
        parameters = loading.result()
        if worker is not None:
            worker.check()
        if hosts is not None:
            _join_hosts(hosts, placement, programs, status)
        status("checking exactness")
        fallbacks = find_fallbacks(
            resolved.config.exact, programs, parameters, draft and draft.model
        )
        programs.batch_sizes.before_compiling = partial(placement.use_store, store)
        if hosts is not None:
            hosts.agree({"exact": fallbacks.exact})
        if worker is not None:
            place = f" at {', '.join(map(str, placement.addresses))}" * bool(placement.addresses)
            status(f"waiting for the draft's process{place}")
            worker.wait_ready()
        on_failure.pop_all()
    return Loaded(
        resolved=resolved,
        programs=programs,
        parameters=parameters,
        inline=inline,
        worker=worker,
        fallbacks=fallbacks,
        hosts=hosts,
        store=store,
    )


def load_tree(loaded: Loaded, nodes: int, status: Status | None = None) -> Loaded:
    """The same models with trees in place of chains; only what trees run is compiled."""
    status = status or (lambda _line: None)
    assert loaded.inline is not None
    draft = loaded.resolved.draft
    assert draft is not None
    resolved = dataclasses.replace(loaded.resolved, nodes=nodes)
    programs = loaded.programs.with_trees(nodes, _compile_progress("trees", status))
    inline = _inline(resolved, draft, loaded.inline.parameters, status, loaded.store)
    inline.compile("sd")
    return dataclasses.replace(loaded, resolved=resolved, programs=programs, inline=inline)


def _target_programs(resolved: Resolved, status: Status) -> Programs:
    config = resolved.config
    return Programs(
        resolved.target.model,
        **_sizes(resolved),
        verification=Verification(
            widths=resolved.widths,
            support=_shipped_support(resolved),
            rule=config.verify,
            logprobs_of=config.logprobs_of,
            nodes=resolved.nodes,
        ),
        paging=resolved.paging,
        batches=target_batches(resolved),
        progress=_compile_progress("target", status),
    )


def _sizes(resolved: Resolved) -> dict[str, Any]:
    """What programs of either role have room for."""
    return {
        "slots": resolved.config.slots,
        "context": resolved.context,
        "tokens": resolved.target.tokenizer.size,
    }


def _shipped_support(resolved: Resolved) -> int:
    """Number of ids of q that a proposal ships; point masses ship none."""
    has_q = resolved.draft is not None or resolved.custom.draws_from_q
    return resolved.support if has_q and RULES[resolved.config.verify].ships_q else 1


def _draft_settings(resolved: Resolved) -> Drafting:
    config = resolved.config
    return Drafting(
        k=max(resolved.ks, default=0),
        support=resolved.support,
        rule=RULES[config.verify].name,
        branches=resolved.branches,
        saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
        predict=config.predict or "noise",
        confident=resolved.reads_confidence,
        nodes=resolved.nodes,
    )


def _join_hosts(
    hosts: Leader | Follower, placement: Placement, programs: Programs, status: Status
) -> None:
    """Waits for the other processes, and connects the devices of all."""
    status("waiting for the other hosts")
    hosts.agree({"programs": sorted(map(str, programs.names))})
    if placement.target is not None:
        connect(placement.target)


def _stop_on_failure(on_failure: ExitStack, progress: Progress | None) -> Progress:
    """Progress that ends the load, whose thread is waited for, at the first failure."""
    failed = threading.Event()
    on_failure.callback(failed.set)

    def step(done: int, total: int) -> None:
        if failed.is_set():
            raise SsdError("loading has failed")
        if progress is not None:
            progress(done, total)

    return step


def _make_workers(
    settings: WorkerSettings, resolved: Resolved, cores: tuple[int, ...] | None
) -> DraftWorker | DraftWorkers:
    from ssd_jax.placement.process.placement import DraftWorker

    config, placement = resolved.config, resolved.placement
    if placement.addresses:
        from ssd_jax.placement.remote.far_worker import FarWorker

        files = config.draft_files
        settings = msgspec.structs.replace(settings, token=files.read_token(ENGINE_SETTINGS.token))
        workers = [
            DraftWorker(settings, worker=FarWorker(settings, address, files))
            for address in placement.addresses
        ]
    else:
        assignments = zip(placement.workers, deal(cores, len(placement.workers)), strict=True)
        workers = []
        for devices, worker_cores in assignments:
            resources = msgspec.structs.replace(settings.resources, devices=devices)
            placed = msgspec.structs.replace(settings, resources=resources, cores=worker_cores)
            workers.append(DraftWorker(placed))
    if len(workers) == 1:
        return workers[0]
    from ssd_jax.placement.process.workers import DraftWorkers

    return DraftWorkers(workers, placement.layout, config.slots)


def _inline(
    resolved: Resolved,
    draft: OpenedModel,
    weights: Callable[[], list[jax.Array]],
    status: Status,
    store: ProgramStore | None,
) -> InlineDraft:
    drafting = _draft_settings(resolved)
    batches = draft_batches(resolved, draft.model.execution)

    def programs(drafting: Drafting) -> DraftPrograms:
        made = DraftPrograms(
            draft.model,
            **_sizes(resolved),
            paging=resolved.paging,
            drafting=drafting,
            batches=batches,
            progress=_compile_progress("draft", status),
        )
        made.batch_sizes.before_compiling = partial(resolved.placement.use_store, store)
        return made

    def branching_programs() -> BranchingMenu:
        progress = _compile_progress("branches", status)
        if drafting.tree is None:
            return ExpansionPrograms.menu(programs(drafting), resolved.budgets, progress, batches)
        made = TreeExpansionPrograms(trees(), drafting, batches=batches, progress=progress)
        made.batch_sizes.before_compiling = partial(resolved.placement.use_store, store)
        return (made,)

    plain = drafting.in_turn
    shape = plain.tree

    @functools.cache
    def trees() -> TreeDraftPrograms:
        assert shape is not None
        made = TreeDraftPrograms(
            draft.model,
            **_sizes(resolved),
            paging=resolved.paging,
            drafting=plain,
            shape=shape,
            batches=batches,
            progress=_compile_progress("draft", status),
        )
        made.batch_sizes.before_compiling = partial(resolved.placement.use_store, store)
        return made

    return InlineDraft(
        parameters=functools.cache(weights),
        plain=trees if shape else functools.cache(lambda: programs(plain)),
        branching=functools.cache(branching_programs),
    )


def _compile_progress(programs: str, status: Status) -> Progress:
    return lambda done, total: status(f"compiling {programs}: {done} of {total} programs")


def _worker_settings(
    resolved: Resolved, draft: OpenedModel, store: ProgramStore | None
) -> WorkerSettings:
    """Settings of each worker, except its cores and devices."""
    config, layout = resolved.config, resolved.placement.layout
    size, pages = resolved.paging or (0, 0)
    batches = draft_batches(resolved)
    spec = DraftSpec(
        model=draft.identity,
        **{**_sizes(resolved), "slots": layout.slots_per_worker(config.slots)},
        drafting=_draft_settings(resolved),
        budgets=tuple(layout.branches_per_worker(budget) for budget in resolved.budgets),
        dtype=resolved.draft_dtype or resolved.dtype,
        attention=resolved.placement.worker_attention(config.attention),
        draft_temperature=config.draft_temperature,
        page_size=size,
        pages=pages,
        batch_sizes=batches.sizes,
        batches_at_start=batches.at_start,
        batch_patience=batches.patience,
    )
    resources = WorkerResources(
        source=draft.source,
        target=None if draft.checkpoint.target_digest is None else config.target,
        store=None if store is None else store.settings,
    )
    return WorkerSettings(token=secrets.token_hex(), spec=spec, resources=resources)
