"""Names of models as they are shown."""

from __future__ import annotations

from pathlib import Path


def short(source: str) -> str:
    """A source without the directories that it is in."""
    path = Path(source)
    return path.name if path.exists() else source
