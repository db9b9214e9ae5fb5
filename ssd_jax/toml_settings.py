"""Settings in TOML files: names as on the command line, unknown ones refused with a hint."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError


def read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    """Settings of a TOML file, one `name = value` a line, names as on the command line.

    Raises:
      InputError: unreadable file, or an unknown key (with the nearest known one).
    """
    try:
        settings = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"config {path}: {error.strerror or error}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InputError(f"config {path}: not valid TOML: {error}") from None
    check_names(settings, known, f"config {path}: ")
    return settings


def check_names(settings: Mapping[str, Any], known: set[str], where: str = "") -> None:
    """Refuses a name that is no setting, and names the nearest one.

    Raises:
      InputError: an unknown name.
    """
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise InputError(f"{where}unknown key {key!r}; {hint}")
