"""Memory that this process may have."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """Bytes, and whose limit that is: the machine's, or a control group's (version 1 or 2).

    A group cannot have more than those that it is in. Inside a container the names of the outer
    ones may lead nowhere.
    """
    present = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(present, "this machine")]
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue  # no such group here, or the outermost one, which has no limit
        if text.isdecimal():
            limits.append((int(text), f"the control group of {file}"))
    return min(limits, key=lambda limit: limit[0])


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Settings of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Lets glibc's allocator keep what is freed, for programs whose arrays come and go by the
    gigabyte: it else gives large ones back to the system, whose pages are then cleared and found
    again one by one.

    To be called before JAX starts, for arenas of threads that are there already stay. Other
    allocators are as they were.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_MAX, 0)
        set_option(_TRIM_THRESHOLD, 2**31 - 1)


def _limit_files(root: Path) -> Iterator[Path]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mounted = root / "sys/fs/cgroup"
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, file = mounted, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = mounted / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(name)
        for group in (path, *path.parents):
            yield top.joinpath(*group.parts[1:], file)
