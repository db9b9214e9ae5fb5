"""Processor cores that a process may run on."""

from __future__ import annotations

import dataclasses
import functools
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from ssd_jax.errors import InputError

_PART = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")


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

    def pin_target(self) -> tuple[int, ...] | None:
        """Pins this process to the target's cores; returns those of a draft process.

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
            return None
        target = target or _others(draft)
        if target is not None:
            pin(target)
        return draft or _others(target)


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


def pin(cores: Iterable[int]) -> None:
    """Pins every thread that this process has; later ones inherit it."""
    usable_cores()  # remembers those that it was given
    wanted = set(cores)
    for task in Path("/proc/self/task").iterdir():
        try:
            os.sched_setaffinity(int(task.name), wanted)
        except ProcessLookupError:
            continue  # a thread that has ended meanwhile


def _others(cores: Iterable[int] | None) -> tuple[int, ...] | None:
    return tuple(sorted(usable_cores() - {*(cores or ())})) or None


def shown(cores: Iterable[int]) -> str:
    """Cores as the user writes them."""
    return ",".join(str(core) for core in sorted(cores))
