"""Loads a worker's draft: programs and weights, shared by the sessions of all its streams."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ssd_jax.compat import check_sums
from ssd_jax.compile_cache import keep_programs, open_store
from ssd_jax.errors import InputError
from ssd_jax.opened import open_model, open_source
from ssd_jax.runtime.branch_draft import BranchDraft
from ssd_jax.runtime.draft_programs import Drafting, DraftPrograms
from ssd_jax.runtime.expansion_programs import ExpansionPrograms
from ssd_jax.runtime.warm_up import run_once
from ssd_jax.runtime.worker.server import MakeSession
from ssd_jax.runtime.worker.session import Session
from ssd_jax.runtime.worker.settings import WorkerSettings


def load_sessions(settings: WorkerSettings) -> MakeSession:
    """Compiles and loads a draft, and runs it once: the first rounds must not be late.

    Raises:
      InputError: a checkpoint that cannot be used.
    """
    if settings.compile_cache is not None:
        keep_programs(open_store(settings.compile_cache))
    check_sums()
    about = settings.hello
    target = None if settings.target is None else open_source(settings.target)
    opened = open_model(settings.source, settings.dtype, target=target)
    if opened.fingerprint != about.model:
        raise InputError(f"{settings.source} has changed since the target opened it; start again")
    with ThreadPoolExecutor(1) as pool:
        loading = pool.submit(opened.load)
        drafting = Drafting(
            k=about.k,
            support=settings.support,
            rule=about.rule,
            branches=about.branches,
            saguaro_c=settings.saguaro_c,
            predict=settings.predict,
            confident=settings.confident,
        )
        base = DraftPrograms(
            opened.model,
            slots=about.slots,
            context=about.context,
            tokens=about.tokens,
            drafting=drafting,
        )
        menu = ExpansionPrograms.menu(base, settings.budgets)
        parameters = loading.result()

    def draft() -> BranchDraft:
        return BranchDraft(menu, parameters, temperature=settings.draft_temperature)

    run_once(draft())

    def session(called: Callable[[], bool]) -> Session:
        return Session(about, draft, called)

    return session
