"""A clock that work moves."""

from __future__ import annotations


class Watch:
    """A clock that work moves."""

    def __init__(self, now: float = 100.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
