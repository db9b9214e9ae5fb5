"""What a worker logs about those that it refuses."""

from __future__ import annotations

import logging

_LOG = logging.getLogger(__name__)


class Refusals:
    """Logs each kind of refusal once, so that a flood of strangers does not fill the log.

    Args:
      subject: what is refused.
    """

    def __init__(self, subject: str = "a stream") -> None:
        self._subject = subject
        self._logged: set[str] = set()

    def log(self, kind: str, reason: object) -> None:
        """Logs a warning for the first refusal of a kind."""
        level = logging.DEBUG if kind in self._logged else logging.WARNING
        self._logged.add(kind)
        subject = self._subject
        _LOG.log(level, "%s is refused (others like it are not mentioned): %s", subject, reason)
