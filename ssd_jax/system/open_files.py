"""How many files, sockets among them, this process may have open."""

from __future__ import annotations

import contextlib
import resource


def allow_most_files() -> None:
    """Raises the limit as far as the process may: often from 1,024, too few for a server."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):  # a limit of the system itself
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
