"""A worker process with a scripted draft; its command line says how it misbehaves."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from ssd_jax.placement.process.main import run
from ssd_jax.placement.process.server import serve
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.supervisor import WorkerReport
from tests.placement.process.script import ScriptedDraft, drafting

_ROOT = Path(__file__).parents[3]


def command(*how: str) -> list[str]:
    """What starts it, from wherever."""
    code = (
        f"import sys; sys.path.insert(0, {str(_ROOT)!r});"
        "from tests.placement.process import fake_worker; fake_worker.main(sys.argv[1:])"
    )
    return [sys.executable, "-c", code, *how]


def main(how: list[str]) -> None:
    """Serves, or fails as told."""

    def start(settings):
        if "error" in how:
            raise ValueError("no room for the draft")
        if "exit" in how:
            print("the last words", file=sys.stderr, flush=True)
            sys.exit(7)
        if "other" in how:
            settings = msgspec.structs.replace(settings, spec=drafting(settings.spec, support=3))
        server = serve(
            lambda called: DraftSession(settings.spec, ScriptedDraft, called),
            settings.spec,
            settings.token,
        )
        return server, WorkerReport(address=server.address)

    run(start)
