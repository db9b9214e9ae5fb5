"""Where this package keeps data that it can fetch or compute again."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import NamedTuple

from ssd_jax.system.paths import user_path


class StoreSettings(NamedTuple):
    """Where programs are stored, as keyword arguments of a `Config`.

    Attributes:
      compile_cache: a directory, "auto" or "off".
      compile_cache_secret: a file with the secret of its entries.
    """

    compile_cache: str = "auto"
    compile_cache_secret: str | None = None


def cache_dir() -> Path:
    """`$XDG_CACHE_HOME/ssd_jax`, by default `~/.cache/ssd_jax`; it may not exist yet.

    A relative `XDG_CACHE_HOME` is ignored, as its specification requires.

    Raises:
      FileNotFoundError: the user has no home directory.
    """
    base = Path(os.environ.get("XDG_CACHE_HOME", ""))
    if not base.is_absolute():
        try:
            base = Path.home() / ".cache"
        except RuntimeError:
            reason = "there is no home directory; set HOME or XDG_CACHE_HOME"
            raise FileNotFoundError(errno.ENOENT, reason, "~/.cache") from None
    return base / "ssd_jax"


def compile_cache(setting: str) -> Path:
    """Absolute directory of compiled programs, for `auto` or a directory of the user's.

    Raises:
      InputError: see `user_path`.
    """
    return cache_dir() / "xla" if setting == "auto" else user_path(setting).absolute()


def costs_cache(setting: str) -> Path:
    """Directory of measured costs: beside the default cache of programs, or in the user's own."""
    return (cache_dir() if setting == "auto" else compile_cache(setting)) / "costs"
