"""What a worker logs about those that it refuses."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class Refusals:
    """Logs each kind of refusal once, so that a flood of strangers does not fill the log.

    Args:
      what: what is refused.
    """

    def __init__(self, what: str = "a stream") -> None:
        self._what = what
        self._said: set[str] = set()

    def say(self, kind: str, why: object) -> None:
        """Logs a warning for the first refusal of a kind."""
        level = logging.DEBUG if kind in self._said else logging.WARNING
        self._said.add(kind)
        what = self._what
        _LOG.log(level, "%s is refused (others like it are not mentioned): %s", what, why)
