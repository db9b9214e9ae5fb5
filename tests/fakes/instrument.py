"""Fakes of roles whose calls are noted, take time, or fail."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

from tests.fakes.watch import Watch

OUTCOMES = "prefill_last", "accept"
"""Methods that return outcomes."""


@dataclasses.dataclass
class At:
    """Acts at the `number`-th call alone, where an error is raised; 0 is never."""

    number: int
    act: BaseException | Callable[[], object]
    calls: int = 0

    def __call__(self, *_args: Any, **_named: Any) -> None:
        self.calls += 1
        if self.calls == self.number:
            _done(self.act, (), {})

    @property
    def happened(self) -> bool:
        return 0 < self.number <= self.calls


def instrument(
    role: Any,
    *,
    note: Mapping[str, Any] | None = None,
    delay: Mapping[str, Any] | None = None,
    fail: Mapping[str, Any] | None = None,
    change: Mapping[str, Callable[[Any], Any]] | None = None,
    after: bool = False,
    watch: Watch | None = None,
) -> Any:
    """`role`, some of whose methods do more, in this order; each by the method's name.

    `outcomes` are what `prefill_last` and `accept` return, and `read` is their read.

    Args:
      note: a list that gets the name, or a function of the call's arguments.
      delay: seconds, or a function of the arguments that returns them.
      fail: an error, or a function of the arguments that may raise one.
      change: makes another result of the call's.
      after: it fails when the call has done its work.
      watch: the clock that delays move; without one they are slept.
    """
    note, delay, fail, change = note or {}, delay or {}, fail or {}, change or {}
    names = {*note, *delay, *fail, *change}

    def replace(holder: Any, name: str) -> Any:
        method = getattr(holder, name)

        def call(*args: Any, **named: Any) -> Any:
            if isinstance(note.get(name), list):
                note[name].append(name)
            else:
                _done(note.get(name), args, named)
            seconds = _done(delay.get(name), args, named)
            if seconds and watch is not None:
                watch.now += seconds
            elif seconds:
                time.sleep(seconds)
            if not after:
                _done(fail.get(name), args, named)
            result = method(*args, **named)
            if after:
                _done(fail.get(name), args, named)
            if name in OUTCOMES and "read" in names:
                result = replace(result, "read")
            if name in OUTCOMES:
                result = change.get("outcomes", lambda outcomes: outcomes)(result)
            return change[name](result) if name in change else result

        setattr(holder, name, call)
        return holder

    if names & {"read", "outcomes"}:
        names |= {*OUTCOMES}
    for name in names - {"read", "outcomes"}:
        replace(role, name)
    return role


def changing_proposals(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Has a drafter's proposals changed before they are verified."""
    return lambda drafter: instrument(drafter, change={"proposal": change})


def _done(what: Any, args: tuple, named: dict[str, Any]) -> Any:
    if isinstance(what, BaseException):
        raise what.with_traceback(None)
    return what(*args, **named) if callable(what) else what
