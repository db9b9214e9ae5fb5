"""Processor cores that a process may run on."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import re
from collections.abc import Callable, Iterable, Sequence, Set
from pathlib import Path
from typing import ClassVar, Self

from ssd_jax.errors import InputError

_RANGE = re.compile(r"(\d{1,5})(?:-(\d{1,5}))?")
_pins: dict[object, Set[int]] = {}  # cores that this process is pinned to, latest last
_original_cores: dict[int, Set[int]] = {}  # cores of threads before; 0 is for threads to come
_XLA_POOL = "tf_XLAEigen"  # the threads that run parts of loops on a processor, by name


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoleNumbers:
    """Numbers of the two roles' own cores or devices, ascending; None if not given."""

    target: tuple[int, ...] | None
    draft: tuple[int, ...] | None
    item: ClassVar[str]
    """Name of one item, as in the settings target_*s and draft_*s."""

    @classmethod
    def parse(cls, target: str | None, draft: str | None) -> Self:
        """Reads the two settings.

        Raises:
          InputError: a setting is not a list of numbers, or both have a number.
        """
        names = f"target_{cls.item}s", f"draft_{cls.item}s"
        numbers = [
            None if text is None else parse_numbers(name, text, cls.item)
            for name, text in zip(names, (target, draft), strict=True)
        ]
        common = {*(numbers[0] or ())} & {*(numbers[1] or ())}
        if common:
            raise InputError(
                f"{names[0]} = {target!r} and {names[1]} = {draft!r} share {shown(common)}; "
                f"give each {cls.item}s of its own"
            )
        return cls(target=numbers[0], draft=numbers[1])


class Cores(RoleNumbers):
    """Cores of the two roles; None leaves the choice to the system."""

    item = "core"

    def pin_target(self) -> tuple[tuple[int, ...] | None, Callable[[], None]]:
        """Pins this process to the target's cores.

        A role without its own cores gets the remaining ones, if there are any. If neither role has
        cores, nothing is pinned.

        Returns: the draft's cores, None to leave the choice to the system; and a function that
          undoes the pinning, see `pin`.

        Raises:
          InputError: a core cannot be used.
        """
        for name, cores in (("target_cores", self.target), ("draft_cores", self.draft)):
            if cores is not None:
                require_usable(name, cores)
        target, draft = self.target, self.draft
        if target is None and draft is None:
            return None, lambda: None
        target = target or _remaining(draft)
        restore = (lambda: None) if target is None else pin(target)
        return draft or _remaining(target), restore


def deal(cores: tuple[int, ...] | None, processes: int) -> list[tuple[int, ...] | None]:
    """Deals cores to processes, or gives all to each if there are fewer cores than processes; None
    leaves the choice to the system."""
    if cores is None or len(cores) < processes:
        return [cores] * processes
    return [tuple(cores[number::processes]) for number in range(processes)]


def parse_numbers(name: str, text: str, item: str) -> tuple[int, ...]:
    """Numbers of cores or devices, ascending, from a list of numbers and ranges such as "0,2-3".

    Raises:
      InputError: the text is not such a list.
    """
    numbers: set[int] = set()
    for part in text.split(","):
        match = _RANGE.fullmatch(part.strip())
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if last < first:
            raise InputError(
                f"{name} = {text!r} is not understood; give {item} numbers and ranges, such as "
                "0,2-3"
            )
        numbers.update(range(first, last + 1))
    return tuple(sorted(numbers))


@functools.cache
def usable_cores() -> frozenset[int]:
    """Cores that this process was given, whatever it is pinned to now; empty if pinning is not
    possible.

    More may exist, but a user who starts the process on some cores wants it there.
    """
    return frozenset(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ())


def require_usable(name: str, cores: Sequence[int]) -> None:
    """Raises: InputError: a core does not exist, or this process may not run on it."""
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
    """Pins all threads of this process; later ones inherit it. The latest of several pins applies.

    Returns: a function that ends the pin. Threads then follow the latest remaining pin. Without
      one they get back the cores that they had, and threads started since get those of the
      thread that pinned first. Threads that were moved in the meantime stay where they are.
    """
    usable_cores()  # caches the given cores
    token, pinned = object(), set(cores)
    if not _pins:
        _original_cores.clear()
        _original_cores[0] = os.sched_getaffinity(0)
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):  # it has ended meanwhile
            current = os.sched_getaffinity(thread)
            if current not in _pins.values():
                _original_cores[thread] = current
            os.sched_setaffinity(thread, pinned)
    _pins[token] = pinned
    return functools.partial(_unpin, token)


def _unpin(token: object) -> None:
    cores = _pins.pop(token)
    for thread in _threads():
        with contextlib.suppress(ProcessLookupError):
            if os.sched_getaffinity(thread) == cores:
                original = _original_cores.get(thread, _original_cores[0])
                os.sched_setaffinity(thread, next(reversed(_pins.values()), original))


def compiling_cores() -> int:
    """Most parts into which XLA divides loops of programs that this thread compiles for the
    processor: one for each usable core, and no more than XLA's threads since it started."""
    if not hasattr(os, "sched_getaffinity"):
        return os.cpu_count() or 1
    names = []
    for thread in _threads():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            names.append(Path(f"/proc/self/task/{thread}/comm").read_text().strip())
    usable = len(os.sched_getaffinity(0))
    return min(usable, names.count(_XLA_POOL) or usable)


def _threads() -> list[int]:
    return [int(task.name) for task in Path("/proc/self/task").iterdir()]


def _remaining(cores: Iterable[int] | None) -> tuple[int, ...] | None:
    return tuple(sorted(usable_cores() - {*(cores or ())})) or None


def shown(cores: Iterable[int]) -> str:
    """Cores as the user writes them."""
    return ",".join(str(core) for core in sorted(cores))
