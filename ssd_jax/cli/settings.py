"""Flags made from the fields of `Config` and `SamplingParams`; `--config` sets defaults."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, TypeVar

from absl import flags

from ssd_jax.cli.argv import parse_argv, wrong_type
from ssd_jax.cli.entries import wrap_text
from ssd_jax.cli.flag_help import help_of
from ssd_jax.cli.flags import Flags, FlagSpecs, make_flags
from ssd_jax.cli.main import COMMANDS
from ssd_jax.config.config import Config
from ssd_jax.config.settings import MEANINGLESS
from ssd_jax.config.vllm_names import NAMES, TRANSLATED
from ssd_jax.errors import InputError
from ssd_jax.options.other_names import canonical_settings
from ssd_jax.options.toml_settings import read_toml
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.system.paths import user_path

T = TypeVar("T", Config, SamplingParams)


class ConfigFile(str):
    """The path of a TOML file, and the names of the settings taken from it."""

    __slots__ = ("names",)
    names: frozenset[str]


def new_flags(specs: FlagSpecs | None = None, **defaults: Any) -> Flags:
    """A flag set with a command's own flags, every engine and sampling setting, and `--config`.

    `defaults` replace those of engine and sampling settings.
    """
    flag_specs = dict(specs or {})
    flag_specs["config"] = "TOML file of settings; flags override it"
    for field in (*fields(Config), *fields(SamplingParams)):
        if field.name != "n":
            flag_specs[field.name] = _flag_of(field, defaults.get(field.name, field.default))
    values = make_flags(flag_specs)
    for name in TRANSLATED.keys() - flag_specs.keys():
        values.translated.add(name)
        flags.DEFINE_string(name, None, "", flag_values=values)
    return values


def flag_of(name: str) -> tuple[str, Any, str, Sequence[str]]:
    """The flag of one setting of `Config`, for a command without the others."""
    field = Config.__dataclass_fields__[name]
    return _flag_of(field, field.default)


def _flag_of(field: Field[Any], default: Any) -> tuple[str, Any, str, Sequence[str]]:
    kind = str(field.type).removesuffix(" | None")
    if kind != field.type and field.default is not None:
        kind += " or none"
    default = list(default) if isinstance(default, tuple) else default
    return kind, default, field.metadata["help"], field.metadata.get("choices", ())


def parse(
    values: Flags,
    command: str,
    arguments: Sequence[str],
    *,
    files: Sequence[str] = (),
    config_of_flags: bool = True,
    hidden: Container[str] = (),
) -> Mapping[str, Any]:
    """Parses the command line over the TOML file it names.

    Args:
      files: names of the arguments besides flags, for messages.
      config_of_flags: whether the file of `--config` sets flags; else it is a file like any other.
      hidden: flags that the help leaves out, since they mean nothing for the command.

    Returns: every flag's value by name, and every file as given by its name in `files`.

    Raises:
      InputError: an unknown flag, a value of the wrong type, stray or missing arguments, or a bad
        configuration file.
      SystemExit: `--help`, with status 0.
    """
    flags.DEFINE_boolean("help", False, "show this help", flag_values=values)
    values.set_gnu_getopt()  # flags may come after files
    positional = parse_argv(values, [command, *arguments])[1:]
    usage = " ".join(["ssd-jax", command, *files, "[--flag=value ...]"])
    if values["help"].value:
        visible = [name for name in values if name != "help" and name not in hidden]
        print(f"usage: {usage}\n\n{wrap_text(COMMANDS[command])}\n\n{help_of(values, visible)}")
        raise SystemExit(0)
    if len(positional) > len(files):
        stray = positional[len(files)]
        raise InputError(f"unexpected argument {stray!r}; settings are given as --name=value")
    if len(positional) < len(files):
        raise InputError(f"{files[len(positional)]} is missing; usage: {usage}")
    _translate(values)
    if config_of_flags and "config" in values and values["config"].value is not None:
        _read_config(values)
    options = {name: values[name].value for name in values}
    for name, value in options.items():  # a value from a file may be no path of any system
        if isinstance(value, str) and "\0" in value:
            raise InputError(f"{name} = {value!r} has a character of code 0; leave it out")
    return options | dict(zip(files, positional, strict=True))


def config_of(settings: Mapping[str, Any]) -> Config:
    """The engine's configuration from parsed flags.

    Raises:
      InputError: impossible settings.
    """
    return _build(Config, settings)


def params_of(settings: Mapping[str, Any]) -> SamplingParams:
    """The sampling parameters from parsed flags.

    Raises:
      InputError: impossible settings.
    """
    return _build(SamplingParams, settings)


def _build(kind: type[T], settings: Mapping[str, Any]) -> T:
    """A `kind` made from the settings that belong to it."""
    names = {field.name for field in fields(kind)}  # pyright: ignore[reportArgumentType]
    with naming_file(settings):
        return kind(**{name: value for name, value in settings.items() if name in names})


@contextlib.contextmanager
def naming_file(settings: Mapping[str, Any]) -> Iterator[None]:
    """Adds the file's name to errors about settings from a TOML file."""
    try:
        yield
    except InputError as error:
        if names_from_file(settings) & {*re.findall(r"(\w+) (?:=|is)", str(error))}:
            raise InputError(f"config {settings['config']}: {error}") from None
        raise


def names_from_file(settings: Mapping[str, Any]) -> frozenset[str]:
    """Names of settings from a TOML file, which may also serve other commands and suites."""
    path = settings.get("config")
    return path.names if isinstance(path, ConfigFile) else frozenset()


def require_used(values: Flags, command: str, used: Sequence[str]) -> None:
    """Refuses flags that a command has no use for.

    Raises:
      InputError: the first of them.
    """
    from_file = names_from_file({"config": values["config"].value})
    for name in values:
        if values[name].present and name not in used and name not in from_file:
            takes = ", ".join(f"--{flag}" for flag in used)
            raise InputError(
                f"{name} means nothing for {command}, which takes {takes}; leave it out"
            )


def at_least(settings: Mapping[str, Any], **bounds: int) -> None:
    """Refuses numbers that are too small; settings that are not given pass.

    Raises:
      InputError: the first of them, with the least that is allowed.
    """
    for name, bound in bounds.items():
        if settings[name] is not None and settings[name] < bound:
            raise InputError(f"{name} = {settings[name]} is out of range; give {bound} or more")


def _translate(values: Flags) -> None:
    """Sets the flags that the given ones of `Flags.translated` stand for."""
    translated = {name: values[name].value for name in values.translated if values[name].present}
    if not translated:
        return
    present = {name: values[name].value for name in values if values[name].present}
    names = {name: TRANSLATED[name] for name in translated}
    for name, value in canonical_settings({**present, **translated}, names).items():
        if name not in present:
            _set(values, name, value, "")


def _read_config(values: Flags) -> None:
    """Sets the flags that are not given to their values in the TOML file.

    Settings that mean nothing with the given mode or draft are left out.
    """
    path = ConfigFile(values["config"].value)
    translated = {name: NAMES[name] for name in NAMES.keys() - {*values}}
    read = read_toml(user_path(path), {*values, *translated} - {"config", "help"})
    try:
        read = canonical_settings(read, translated)
    except InputError as error:
        raise InputError(f"config {path}: {error}") from None
    present = {name for name in values if values[name].present}
    conditions = [
        condition
        for condition in MEANINGLESS
        if condition[0] in present and values[condition[0]].value == condition[1]
    ]
    unused = {name for condition in conditions for name in MEANINGLESS[condition]}
    path.names = frozenset({*read} - present - unused)
    for name in path.names:
        _set(values, name, read[name], f"config {path}: ")
    values["config"].value = path


def _set(values: Flags, name: str, value: Any, prefix: str) -> None:
    flag = values[name]
    if isinstance(value, dict):
        raise InputError(
            f"{prefix}[{name}] is a section; give {name} = a value before all sections"
        )
    if isinstance(value, bool) and not flag.boolean:
        raise InputError(f"{prefix}{name} = {str(value).lower()} is a boolean; give another value")
    if isinstance(value, list):
        items = [str(item) for item in value]
        value = ",".join(items) if flag.flag_type() == "string" else items
    try:
        flag.parse(value if isinstance(value, list) else str(value))
    except flags.IllegalFlagValueError as error:
        raise InputError(f"{prefix}{wrong_type(values, error)}") from None
