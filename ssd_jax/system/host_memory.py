"""Host memory that this process may use."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath


def memory_limit(root: Path = Path("/")) -> tuple[int, str]:
    """The limit in bytes, and whose it is: the machine's, or a control group's (version 1 or 2).

    A group cannot have more than the groups that it is in. Inside a container the names of outer
    groups may lead nowhere.
    """
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [(machine, "this machine")]
    for file in _limit_files(root):
        try:
            text = file.read_text().strip()
        except OSError:
            continue  # no such group here, or the outermost group, which has no limit
        if text.isdecimal():
            limits.append((int(text), f"the control group of {file}"))
    return min(limits, key=lambda limit: limit[0])


_TRIM_THRESHOLD, _MMAP_MAX, _ARENA_MAX = -1, -4, -8
"""Settings of glibc's `mallopt`."""


def keep_freed_memory() -> None:
    """Makes glibc's allocator keep freed memory, for programs whose arrays come and go by the
    gigabyte. By default it returns large arrays to the system, and new pages must then be cleared
    and mapped one by one.

    Call it before JAX starts, since arenas of existing threads stay. Other allocators are not
    affected.
    """
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_ARENA_MAX, 1)
        set_option(_MMAP_MAX, 0)
        set_option(_TRIM_THRESHOLD, 2**31 - 1)


def give_back_freed_memory() -> None:
    """Makes glibc's allocator return freed memory to the system, which it does not do by itself for
    the memory of threads. Other allocators are not affected.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _limit_files(root: Path) -> Iterator[Path]:
    try:
        groups = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    mount = root / "sys/fs/cgroup"
    for line in groups:
        _, controllers, name = line.split(":", 2)
        if not controllers:
            top, file = mount, "memory.max"
        elif "memory" in controllers.split(","):
            top, file = mount / "memory", "memory.limit_in_bytes"
        else:
            continue
        path = PurePosixPath(name)
        for group in (path, *path.parents):
            yield top.joinpath(*group.parts[1:], file)
