"""Two tiny checkpoints: a target, and a draft that often agrees with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ssd_jax.testing import tiny


def write(root: Path, family: str = "llama", *, noise: float = 0.04, **changes: Any) -> list[str]:
    """Paths of `target` and `draft` in a directory; arguments as for `tiny.write_checkpoint`."""
    return [
        str(tiny.write_checkpoint(root / name, family, noise=of, **changes))
        for name, of in (("target", 0.0), ("draft", noise))
    ]
