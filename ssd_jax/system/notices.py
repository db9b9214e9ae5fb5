"""Lines that a command logs once, however many models it loads and processes it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_LOG = logging.getLogger(__name__)
_logged: dict[str, None] = {}


def warn_once(lines: Iterable[str]) -> None:
    """Logs those lines, as warnings, that have not been logged yet."""
    for line in lines:
        if line not in _logged:
            _logged[line] = None
            _LOG.warning(line)


def logged_lines() -> tuple[str, ...]:
    """Lines that need not be logged again, for processes that this one starts and the one that
    started it."""
    return tuple(_logged)


def mark_logged(lines: Iterable[str]) -> None:
    """Counts lines as logged that another process of the command has logged."""
    _logged.update(dict.fromkeys(lines))
