"""Work that a forked process leaves to the process that it was forked from."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def only_in_owner(function: Callable[..., Any]) -> Callable[..., None]:
    """Wraps a function to do nothing in forks of this process, which owns what the function ends,
    writes or waits for."""
    owner = os.getpid()

    def in_owner(*arguments: Any) -> None:
        if os.getpid() == owner:
            function(*arguments)

    return in_owner
