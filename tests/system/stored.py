"""Entries of a store of programs."""

from __future__ import annotations

import re
from pathlib import Path


def key_of(path: Path) -> str:
    return re.sub(r"(-\d+-cores)?\.program$", "", path.name)
