"""Help of a command's flags, by group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ssd_jax.cli.entries import entry
from ssd_jax.cli.flags import Flags
from ssd_jax.config.settings import settings_where
from ssd_jax.sampling.params import SamplingParams

SAMPLING = tuple(field.name for field in fields(SamplingParams) if field.name != "n")
"""Settings of a request; only one command makes several texts of a prompt."""
_HEADINGS = {
    "engine": ("config", *settings_where(group="engine")),
    "speculation": settings_where(group="speculation"),
    "sampling": SAMPLING,
}
_ABSL_NOTE = ";\n    repeat this option to specify a list of values"  # absl adds it


def help_of(values: Flags, listed: Sequence[str]) -> str:
    """The command's own flags, then those of each heading."""
    headings = _HEADINGS if {*SAMPLING} <= {*values} else {}
    headed = {name for names in headings.values() for name in names}
    lines = [_describe(values, name) for name in listed if name not in headed]
    lines.append(_describe(values, "help"))
    for heading, names in headings.items():
        if group := [name for name in names if name in listed]:
            lines += ["", f"{heading}:", *(_describe(values, name) for name in group)]
    return "\n".join(lines)


def _describe(values: Flags, name: str) -> str:
    default, choices = _default_text(values[name].default), values.choices.get(name, ())
    text = " ".join(values[name].help.replace(_ABSL_NOTE, "; may be repeated").split())
    text += f": {', '.join(choices)}" if choices else ""
    text += f" (default {default})" if default and name != "help" else ""
    return entry(f"--{name}", text)


def _default_text(default: Any) -> str:
    """A default as it is typed; empty where it is None: the help may say what holds then."""
    if isinstance(default, list):
        return ",".join(map(str, default))
    if isinstance(default, bool):
        return str(default).lower()
    return "" if default is None else str(default)
