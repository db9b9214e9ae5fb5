"""Processor cores that a process may run on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import NamedTuple

from ssd_jax.errors import InputError

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


class Pinned(NamedTuple):
    """What came of pinning.

    Attributes:
      draft: cores of a draft process; None is wherever the system likes.
      restore: undoes it, see `pin`.
    """

    draft: tuple[int, ...] | None
    restore: Callable[[], None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cores:
    """Cores of the two roles; None is wherever the system likes."""

    target: tuple[int, ...] | None
    draft: tuple[int, ...] | None

    @classmethod
    def parse(cls, target: str | None, draft: str | None) -> Cores:
        """From the settings target_cores and draft_cores.

        Raises:
          InputError: not a list of cores, or a core of both.
        """
        cores = cls(
            target=None if target is None else parse_cores("target_cores", target),
            draft=None if draft is None else parse_cores("draft_cores", draft),
        )
        shared = {*(cores.target or ())} & {*(cores.draft or ())}
        if shared:
            raise InputError(
                f"target_cores = {target!r} and draft_cores = {draft!r} share {shown(shared)}; "
                "give each cores of its own"
            )
        return cores

    def pin_target(self) -> Pinned:
        """Pins this process to the target's cores.

        A role without cores of its own gets those that the other leaves, if it leaves any. Without
        cores of either nothing is pinned.

        Raises:
          InputError: a core that cannot be used.
        """
        for name, cores in (("target_cores", self.target), ("draft_cores", self.draft)):
            if cores is not None:
                require_usable(name, cores)
        target, draft = self.target, self.draft
        if target is None and draft is None:
            return Pinned(None, _nothing)
        target = target or _others(draft)
        restore = _nothing if target is None else pin(target)
        return Pinned(draft or _others(target), restore)


def parse_cores(name: str, text: str) -> tuple[int, ...]:
    """See `parse_numbers`."""
    return parse_numbers(name, text, "core")


def parse_numbers(name: str, text: str, of: str) -> tuple[int, ...]:
    """Numbers of cores or devices, ascending, from a list of numbers and ranges such as "0,2-3".

    Raises:
      InputError: not such a list.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _PART.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{name} = {text!r} is not understood; give {of} numbers and ranges, such as 0,2-3"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


@functools.cache
def usable_cores() -> frozenset[int]:
    """Cores that this process was given, whatever it is pinned to now; none if none can be set.

    More may exist, but a user who has started it on some of them wants it there.
    """
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def require_usable(name: str, cores: Sequence[int]) -> None:
    """Raises: InputError: a core that does not exist, or that this process may not run on."""
    usable = usable_cores()
    if not usable:
        raise InputError(f"{name} = {shown(cores)}: this system cannot pin to cores; leave it out")
    missing = {*cores} - usable
    if missing:
        raise InputError(
            f"{name} = {shown(cores)}: there is no core {shown(missing)} to run on; there are "
            f"{shown(usable)}"
        )


def pin(cores: Iterable[int]) -> Callable[[], None]:
    """Pins every thread that this process has; later ones inherit it.

    Returns: gives each thread back what it had, and those that have started since what the calling
      one had. Threads that were moved in the meantime stay where they are.
    """
    usable_cores()  # remembers those that it was given
    wanted, before, default = set(cores), {}, os.sched_getaffinity(0)
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            before[thread] = os.sched_getaffinity(thread)
            os.sched_setaffinity(thread, wanted)
    return functools.partial(_unpin, wanted, before, default)


def _unpin(cores: Set[int], before: Mapping[int, Set[int]], default: Set[int]) -> None:
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == cores:
                os.sched_setaffinity(thread, before.get(thread, default))


def _threads() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def _nothing() -> None:
    """Undoes what was not done."""


def _others(cores: Iterable[int] | None) -> tuple[int, ...] | None:
    return tuple(sorted(usable_cores() - {*(cores or ())})) or None


def shown(cores: Iterable[int]) -> str:
    """Cores as the user writes them."""
    return ",".join(str(core) for core in sorted(cores))
