"""How often Python looks for objects that refer to nothing but each other."""

from __future__ import annotations

import gc

_OBJECTS = 20_000  # new ones between two searches; Python's own number is 700


def collect_seldom() -> None:
    """For a process of this package's own: to import and to trace makes objects that stay, and to
    search them again and again was a tenth of a start."""
    gc.set_threshold(_OBJECTS, *gc.get_threshold()[1:])
