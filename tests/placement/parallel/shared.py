"""Engines over several scripted drafts in workers of this process, which share the work of one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple

import msgspec

from ssd_jax.placement.parallel.by_branches import DraftByBranches
from ssd_jax.placement.parallel.by_slots import DraftBySlots
from ssd_jax.placement.parallel.layout import Layout
from ssd_jax.placement.process import server
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import connector
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.wire.draft_spec import DraftSpec
from tests.placement.process.script import HELLO, SLOTS, TOKEN, M, ScriptedDraft
from tests.placement.process.scripted import Run, run_of
from tests.placement.process.serving import steady_streams


class Worker(NamedTuple):
    """One of them: the engine's end, its sessions, and what stops it."""

    remote: RemoteDraft
    sessions: list[DraftSession]
    stop: Callable[[], Any]


class Shared(NamedTuple):
    """An engine and its draft's workers, by groups."""

    run: Run
    workers: list[Worker]


def spec_of(layout: Layout) -> DraftSpec:
    """What each worker is."""
    return msgspec.structs.replace(
        HELLO, slots=layout.slots_per_worker(SLOTS), budgets=(layout.branches_per_worker(M),)
    )


@contextmanager
def sharing(
    layout: Layout,
    draft: Callable[[DraftSpec], ScriptedDraft] = ScriptedDraft,
    *,
    by_branches: type[DraftByBranches] = DraftByBranches,
    by_slots: type[DraftBySlots] = DraftBySlots,
    patience: float = 30.0,
    backup: str = "none",
):
    """An engine whose draft's workers share the work so."""
    hello, workers = spec_of(layout), []
    with ExitStack() as ends, steady_streams():
        for _ in range(layout.workers):
            workers.append(ends.enter_context(_worker(hello, draft, patience)))
        parts: list[Any] = [worker.remote for worker in workers]
        if layout.parts > 1:
            size = layout.parts
            parts = [by_branches(parts[n : n + size]) for n in range(0, len(parts), size)]
        joined = by_slots(parts, SLOTS) if len(parts) > 1 else parts[0]
        yield Shared(run_of(joined, backup=backup), workers)


@contextmanager
def _worker(hello: DraftSpec, draft: Callable[[DraftSpec], ScriptedDraft], patience: float):
    sessions: list[DraftSession] = []

    def make(called):
        sessions.append(DraftSession(hello, lambda: draft(hello), called))
        return sessions[-1]

    serving = server.serve(make, hello, TOKEN)
    counters: Counter[str] = Counter()
    connect = connector(hello, TOKEN, lambda: serving.address, counters)
    streams = WorkerStreams(connect, counters, lambda: serving.address)
    remote = RemoteDraft(hello, streams, patience=patience)
    assert remote.streams.wait_ready(60)
    try:
        yield Worker(remote, sessions, lambda: serving.stop())
    finally:
        remote.close()
        serving.stop()
