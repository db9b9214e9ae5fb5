"""Lines that a command says once, however many models it loads and processes it starts."""

from __future__ import annotations

import logging
from collections.abc import Iterable

_LOG = logging.getLogger(__name__)
_said: dict[str, None] = {}


def say(lines: Iterable[str]) -> None:
    """Warns of those that have not been said."""
    for line in lines:
        if line not in _said:
            _said[line] = None
            _LOG.warning(line)


def said() -> tuple[str, ...]:
    """What this process need not say again; for processes that it starts, and the one that has
    started it."""
    return tuple(_said)


def count_as_said(lines: Iterable[str]) -> None:
    """Takes lines for said that another process of the command has said."""
    _said.update(dict.fromkeys(lines))
