"""How often Python's garbage collector looks for objects that only refer to each other."""

from __future__ import annotations

import gc

_OBJECTS = 20_000  # new ones between two collections; Python's default is 700


def collect_seldom() -> None:
    """Collects less often, in a process of this package: imports and tracing make objects that
    stay, and searching them repeatedly took a tenth of a start."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
