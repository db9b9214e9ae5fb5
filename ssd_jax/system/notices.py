"""Lines that a process logs once, however many models it loads."""

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
