"""Drafts of workers that do not go on until a test lets them."""

from __future__ import annotations

import threading

from tests.fakes.instrument import At, instrument
from tests.placement.process.script import ScriptedDraft


def stuck(go, call="branch_off", at=5):
    """What makes drafts that wait in a call until `go` is set."""
    wait = lambda: go.wait(60)  # noqa: E731
    return lambda: instrument(ScriptedDraft(), note={call: At(at, wait)})


def unmade(go=None):
    """A draft that is not made before its worker is ended, what ends that, and whose end it was."""
    ends, go = [], go or threading.Event()

    def make():
        go.wait(60)
        return ScriptedDraft()

    def end(address):
        ends.append(address)
        go.set()

    return make, end, ends
