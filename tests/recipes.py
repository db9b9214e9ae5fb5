"""Code of pages, as a reader would run it."""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^( *)```python\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)


def recipe(page: str, heading: str, *, without: str | None = None) -> dict[str, Any]:
    """The names that a section's Python defines, once it has run.

    Args:
      without: begins a line that is not run, nor any line behind it.
    """
    section = (ROOT / page).read_text(encoding="utf-8").split(f"\n## {heading}\n")[1]
    code = "\n".join(
        textwrap.dedent(block) for _, block in _BLOCK.findall(section.split("\n## ")[0])
    )
    names: dict[str, Any] = {}
    exec(code.split(f"\n{without}")[0] if without else code, names)
    return names
