"""What a worker says of those that it refuses."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class Refusals:
    """Says once of each kind who is refused: no flood of strangers fills the log."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def say(self, kind: str, why: object) -> None:
        """Logs a warning, for the first of a kind."""
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        _LOG.log(level, "a stream is refused (others like it are not mentioned): %s", why)
