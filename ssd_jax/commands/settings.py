"""Flags made from the fields of `Config` and `SamplingParams`; `--config` sets defaults."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import Field, fields
from pathlib import Path
from typing import Any

from absl import flags

from ssd_jax.config import Config, from_settings
from ssd_jax.errors import InputError
from ssd_jax.runtime.request import SamplingParams
from ssd_jax.toml_settings import read_toml


def new_flags() -> flags.FlagValues:
    """A flag set with every engine and sampling setting, and `--config`."""
    values = flags.FlagValues()
    flags.DEFINE_string(
        "config", None, "TOML file of settings; flags override it", flag_values=values
    )
    # A name of both, such as logprobs, is one flag: the engine is prepared for what is asked.
    both = {field.name: field for kind in (Config, SamplingParams) for field in fields(kind)}
    for field in both.values():
        _define(field, values)
    return values


def parse(
    values: flags.FlagValues,
    command: str,
    arguments: Sequence[str],
    *,
    files: Sequence[str] = (),
    config_of_flags: bool = True,
) -> Mapping[str, Any]:
    """Parses the command line over the TOML file it names.

    Args:
      values: the command's flags.
      command: its name.
      arguments: what follows it.
      files: names of the arguments it takes beside flags, for messages.
      config_of_flags: whether what `--config` names sets flags; else it is a file like any other.

    Returns: every flag's value by name, and every file as given by its name in `files`.

    Raises:
      InputError: stray or missing arguments, or a bad configuration file.
      flags.Error: an unknown flag or a value of the wrong type.
      SystemExit: `--help`, after printing it.
    """
    flags.DEFINE_boolean("help", False, "show this help", flag_values=values, short_name="h")
    values.set_gnu_getopt()  # flags may come after files
    rest = values([command, *arguments])[1:]
    usage = " ".join(["ssd-jax", command, *files, "[--flag=value ...]"])
    if values["help"].value:
        print(f"usage: {usage}\n\n{_help(values)}")
        raise SystemExit(0)
    if len(rest) > len(files):
        stray = rest[len(files)]
        raise InputError(f"unexpected argument {stray!r}; settings are given as --name=value")
    if len(rest) < len(files):
        raise InputError(f"{files[len(rest)]} is missing; usage: {usage}")
    if config_of_flags and "config" in values and values["config"].value is not None:
        path = Path(values["config"].value)
        known = set(values) - {"config", "help", "h"}
        for name, value in read_toml(path, known).items():
            if not values[name].present:
                _set(values[name], value, path)
    return {name: values[name].value for name in values} | dict(zip(files, rest, strict=True))


def config_of(settings: Mapping[str, Any]) -> Config:
    """The engine's configuration from parsed flags."""
    return from_settings(Config, dict(settings))


def params_of(settings: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters from parsed flags."""
    return from_settings(SamplingParams, dict(settings))


def _define(field: Field, values: flags.FlagValues) -> None:
    text = field.metadata["help"]
    choices = field.metadata.get("choices")
    if choices:
        text = f"{text}: {', '.join(choices)}"
    kind = str(field.type).removesuffix(" | None")
    define = {
        "bool": flags.DEFINE_boolean,
        "int": flags.DEFINE_integer,
        "float": flags.DEFINE_float,
        "str": flags.DEFINE_string,
        "tuple[str, ...]": flags.DEFINE_multi_string,
        "tuple[int, ...]": flags.DEFINE_multi_integer,
        "tuple[tuple[int, float], ...]": flags.DEFINE_multi_string,
    }[kind]
    default = list(field.default) if isinstance(field.default, tuple) else field.default
    define(field.name, default, text, flag_values=values)


def _set(flag: flags.Flag, value: Any, path: Path) -> None:
    try:
        flag.parse([str(item) for item in value] if isinstance(value, list) else str(value))
    except flags.Error as error:
        raise InputError(f"config {path}: {error}") from None


def _help(values: flags.FlagValues) -> str:
    lines = []
    for name in sorted(set(values) - {"h"}):
        flag = values[name]
        default = "" if flag.default in (None, [], False) else f" (default {flag.default})"
        lines.append(f"  --{name:18} {flag.help}{default}")
    return "\n".join(lines)
