"""What is said of requests that a device or a bug has ended early."""

from __future__ import annotations

from collections.abc import Sequence

from ssd_jax.errors import SsdError


def failure(names: Sequence[str], runs: int, what: str) -> SsdError:
    """The error of a command of which some requests ended with finish_reason `error`.

    Args:
      names: of those that failed.
      runs: how many ran.
      what: they are, in the plural.
    """
    shown = ", ".join(names[:5]) + (", ..." if len(names) > 5 else "")
    return SsdError(
        f"{len(names)} of {runs} {what} ended with finish_reason error ({shown}): their text is "
        "incomplete, run them again"
    )
