"""Drafts that do not go on until a test lets them."""

from __future__ import annotations

import threading

from tests.placement.process.script import ScriptedDraft


class Stuck(ScriptedDraft):
    """Waits in its fifth expansion until it may go on."""

    go = threading.Event()

    def __init__(self):
        super().__init__()
        self.left = 5

    def branch_off(self, *arguments, **more):
        self.left -= 1
        if not self.left:
            self.go.wait(60)
        super().branch_off(*arguments, **more)


class StuckInDraft(Stuck):
    """The same, in its second draft just in time."""

    def __init__(self):
        super().__init__()
        self.left = 2

    def draft(self, *arguments, **more):
        self.left -= 1
        if not self.left:
            self.go.wait(60)
        return super().draft(*arguments, **more)

    branch_off = ScriptedDraft.branch_off


def unmade():
    """A draft that is not made before its worker is ended, what ends that, and whose end it was."""
    ends, go = [], threading.Event()

    class Unmade(ScriptedDraft):
        def __init__(self):
            go.wait(60)
            super().__init__()

    def end(address):
        ends.append(address)
        go.set()

    return Unmade, end, ends
