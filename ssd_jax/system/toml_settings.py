"""Settings in TOML files: names as on the command line, unknown ones refused with a hint."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.system.files import brief, read_text, require_shallow, shown

_MOST_BYTES = 1 << 18
_LONGEST = 8192
"""Characters of a value, which errors may quote."""

_MOST_BITS = 64
_MOST_DOTS = 100
"""In a line that is no comment: the time that `tomllib` takes for a key grows with their square."""


def read_toml(path: Path, known: set[str]) -> dict[str, Any]:
    """Settings of a TOML file, one `name = value` a line, names as on the command line.

    Raises:
      InputError: unreadable file, or an unknown key (with the nearest known one).
    """
    remedy = "give a configuration in TOML"
    text = read_text(path, most=_MOST_BYTES, remedy=remedy)
    try:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.count(".") > _MOST_DOTS and not line.lstrip().startswith("#"):
                raise ValueError(f"more than {_MOST_DOTS} dots (at line {number})")
        settings = tomllib.loads(text)
        require_shallow(settings)
        _require_short(settings)
    except RecursionError:
        raise InputError(f"config {path}: nested too deeply; {remedy}") from None
    except ValueError as error:
        raise InputError(f"config {path}: not valid TOML: {brief(error)}") from None
    check_names(settings, known, f"config {path}: ")
    return settings


def _require_short(value: object) -> None:
    if isinstance(value, str) and len(value) > _LONGEST:
        raise ValueError(f"a text of {len(value)} characters, the limit is {_LONGEST}")
    if isinstance(value, int) and value.bit_length() > _MOST_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits, the limit is {_MOST_BITS}")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _require_short(item)


def check_names(settings: Mapping[str, Any], known: set[str], where: str = "") -> None:
    """Refuses a name that is no setting, and names the nearest one.

    Raises:
      InputError: an unknown name.
    """
    for key in settings:
        if key not in known:
            near = difflib.get_close_matches(key, sorted(known), n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise InputError(f"{where}unknown key {shown(key)}; {hint}")
