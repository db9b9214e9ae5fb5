"""What a process leaves to the one that it was forked from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def owned(end: Callable[..., Any]) -> Callable[..., None]:
    """The function, which does nothing in a process that is forked from this one: what it ends,
    writes or waits for belongs to this one."""
    owner = os.getpid()

    def in_owner(*arguments: Any) -> None:
        if os.getpid() == owner:
            end(*arguments)

    return in_owner
