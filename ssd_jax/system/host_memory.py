"""Memory that this process may have."""

from __future__ import annotations

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
