"""Loading: weights load while programs compile, and a draft elsewhere while the target loads."""

from __future__ import annotations

import dataclasses
import functools
import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import jax
import msgspec

from ssd_jax.checkpoints.tensors import Progress
from ssd_jax.compat import check_sums
from ssd_jax.config.config import Config
from ssd_jax.config.settings import AUTO_WIDTHS, SUPPORT
from ssd_jax.devices.draft_programs import Drafting, DraftPrograms
from ssd_jax.devices.expansion_programs import ExpansionPrograms
from ssd_jax.devices.fallbacks import find_fallbacks
from ssd_jax.devices.opened import OpenedModel
from ssd_jax.devices.paged_programs import Paging
from ssd_jax.devices.target_programs import Programs, Verification
from ssd_jax.errors import SsdError
from ssd_jax.loading.loaded import InlineDraft, Loaded
from ssd_jax.placement.hosts.connect import connect
from ssd_jax.placement.hosts.follower import Follower
from ssd_jax.placement.hosts.leader import Leader
from ssd_jax.placement.placement import Placement
from ssd_jax.placement.process.supervisor import WorkerSettings
from ssd_jax.system.cores import deal
from ssd_jax.wire.messages import Hello
from ssd_jax.wire.security import OF_ENGINE

if TYPE_CHECKING:
    from ssd_jax.placement.process.placement import DraftWorker
    from ssd_jax.placement.process.workers import DraftWorkers
    from ssd_jax.system.compile_cache import ProgramStore

Status = Callable[[str], None]
"""Called with the current step of loading, such as "compiling target: 5 of 9 programs"."""


def load(
    config: Config,
    target: OpenedModel,
    draft: OpenedModel | None,
    context: int,
    *,
    ks: Sequence[int],
    placement: Placement,
    paging: Paging | None = None,
    store: ProgramStore | None = None,
    draft_cores: tuple[int, ...] | None = None,
    hosts: Leader | Follower | None = None,
    progress: Progress | None = None,
    status: Status | None = None,
) -> Loaded:
    """Compiles all programs while the weights load.

    Args:
      context: most positions of a sequence.
      ks: numbers of proposed tokens to prepare for; empty without a draft.
      placement: of the draft.
      paging: see `PagedPrograms`.
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
    support = _support(config, target, draft)
    room: dict[str, Any] = {
        "slots": config.slots,
        "context": context,
        "tokens": target.tokenizer.size,
    }
    drafting = Drafting(
        k=max(ks, default=0),
        support=support,
        rule=config.verify,
        branches=config.branches,
        saguaro_c=1.0 if config.saguaro_c is None else config.saguaro_c,
        predict=config.predict or "noise",
        confident=config.fan_out == "confidence",
    )
    elsewhere = placement.apart
    with ThreadPoolExecutor(1) as pool, ExitStack() as on_failure:
        worker = None
        if draft is not None and elsewhere and not isinstance(hosts, Follower):
            about = _worker_settings(config, draft, room, drafting, store, paging, placement)
            worker = _workers(about, config, placement, draft_cores)
            on_failure.callback(worker.close)
            worker.start()
        parameters = pool.submit(target.load, _until(on_failure, progress))
        draft_loads = pool.submit(draft.load).result if draft and not elsewhere else None
        programs = Programs(
            target.model,
            **room,
            verification=Verification(
                widths=tuple(sorted({0, *ks, *(AUTO_WIDTHS if config.chooses_k else ())})),
                support=1 if draft is None or config.verify == "coupled" else support,
                rule=config.verify,
                logprobs_of=config.logprobs_of,
            ),
            paging=paging,
            progress=_compiling("target", status),
        )
        if worker is not None:
            worker.check()
        inline = None
        if draft is not None:
            weights = draft_loads or draft.load
            made = {**room, "paging": paging}
            inline = _inline(draft, made, drafting, config.budgets, weights, status)
            if not elsewhere:
                (inline.branching if config.prepared == "ssd" else inline.plain)()
                inline.parameters()
        loaded = parameters.result()
        if worker is not None:
            worker.check()
        if hosts is not None:
            status("waiting for the other hosts")
            hosts.agree({"programs": sorted(map(str, programs.names))})
            if placement.target is not None:
                connect(placement.target)
        status("checking exactness")
        fallbacks = find_fallbacks(config.exact, programs, loaded, draft and draft.model)
        if hosts is not None:
            hosts.agree({"exact": fallbacks.exact})
        if worker is not None:
            at = f" at {', '.join(map(str, placement.addresses))}" if placement.addresses else ""
            status(f"waiting for the draft's process{at}")
            worker.wait_ready()
        on_failure.pop_all()
    return Loaded(
        config=config,
        programs=programs,
        parameters=loaded,
        inline=inline,
        worker=worker,
        placement=placement,
        tokens=target.tokenizer.size,
        fallbacks=fallbacks,
        hosts=hosts,
        store=store,
    )


def _until(on_failure: ExitStack, progress: Progress | None) -> Progress:
    """Progress that ends the load, whose thread is waited for, at the first failure."""
    failed = threading.Event()
    on_failure.callback(failed.set)

    def step(done: int, total: int) -> None:
        if failed.is_set():
            raise SsdError("loading has failed")
        if progress is not None:
            progress(done, total)

    return step


def _workers(
    about: WorkerSettings,
    config: Config,
    placement: Placement,
    cores: tuple[int, ...] | None,
) -> DraftWorker | DraftWorkers:
    from ssd_jax.placement.process.placement import DraftWorker

    if placement.addresses:
        from ssd_jax.placement.remote.far_worker import FarWorker

        files = config.draft_files
        about = msgspec.structs.replace(about, token=files.read_token(OF_ENGINE.token))
        made = [
            DraftWorker(about, elsewhere=FarWorker(about, address, files))
            for address in placement.addresses
        ]
    else:
        dealt = zip(placement.workers, deal(cores, len(placement.workers)), strict=True)
        made = [
            DraftWorker(msgspec.structs.replace(about, devices=devices, cores=own))
            for devices, own in dealt
        ]
    if len(made) == 1:
        return made[0]
    from ssd_jax.placement.process.workers import DraftWorkers

    return DraftWorkers(made, placement.layout, config.slots)


def _inline(
    draft: OpenedModel,
    room: Mapping[str, Any],
    drafting: Drafting,
    budgets: Sequence[int],
    weights: Callable[[], list[jax.Array]],
    status: Status,
) -> InlineDraft:
    compiling, branches = _compiling("draft", status), _compiling("branches", status)

    def programs(drafting: Drafting) -> DraftPrograms:
        return DraftPrograms(draft.model, **room, drafting=drafting, progress=compiling)

    def menu() -> tuple[ExpansionPrograms, ...]:
        return ExpansionPrograms.menu(programs(drafting), budgets, branches)

    plain = dataclasses.replace(drafting, branches=0, saguaro_c=1.0)
    return InlineDraft(
        parameters=functools.cache(weights),
        plain=functools.cache(lambda: programs(plain)),
        branching=functools.cache(menu),
    )


def _compiling(what: str, status: Status) -> Progress:
    return lambda done, total: status(f"compiling {what}: {done} of {total} programs")


def _worker_settings(
    config: Config,
    draft: OpenedModel,
    room: Mapping[str, int],
    drafting: Drafting,
    store: ProgramStore | None,
    paging: Paging | None,
    placement: Placement,
) -> WorkerSettings:
    """Settings of each worker, except its cores and devices."""
    size, pages = (0, 0) if paging is None else paging
    layout = placement.layout
    budgets = tuple(layout.branches_each(budget) for budget in config.budgets)
    hello = Hello(
        model=draft.identity,
        **{**room, "slots": layout.slots_each(config.slots)},
        k=drafting.k,
        branches=max(budgets),
        support=1 if drafting.rule == "coupled" else drafting.support,
        rule=drafting.rule,
        page_size=size,
        pages=pages,
    )
    return WorkerSettings(
        token=secrets.token_hex(),
        hello=hello,
        source=draft.source,
        target=None if draft.checkpoint.target_digest is None else config.target,
        dtype=config.draft_dtype or config.dtype,
        drafting={
            name: value
            for name, value in dataclasses.asdict(drafting).items()
            if name not in ("k", "rule")
        },
        draft_temperature=config.draft_temperature,
        compile_cache=None if store is None else str(store.directory),
        cores=None,
        budgets=budgets,
        attention=placement.asked_of_worker(config.attention),
    )


def _support(config: Config, target: OpenedModel, draft: OpenedModel | None) -> int:
    """Number of ids that a proposal's q keeps: no more than either model has outputs."""
    most = min(m.model.config.outputs for m in (target, draft) if m is not None)
    if config.proposal_support == "full":
        return most
    return min(SUPPORT if config.proposal_support is None else int(config.proposal_support), most)
