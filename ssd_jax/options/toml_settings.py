"""Settings in TOML files, named as on the command line; unknown names are refused with a hint."""

from __future__ import annotations

import dataclasses
import math
import tomllib
import typing
from pathlib import Path
from typing import Any

import msgspec

from ssd_jax.errors import InputError
from ssd_jax.options.fields import TYPE_WORDS, check_names
from ssd_jax.system.files import brief, read_text, require_shallow

_MAX_BYTES = 1 << 18
_MAX_CHARACTERS = 8192
"""Most characters of a value, which errors may quote."""

_MAX_BITS = 64
_MAX_DOTS = 100
"""Most dots in a non-comment line: the time of `tomllib` for a key grows with their square."""


def read_toml(path: Path, allowed: set[str]) -> dict[str, Any]:
    """Settings of a TOML file, one `name = value` a line, names as on the command line.

    Raises:
      InputError: the file is unreadable, or a key is unknown (with the nearest known one).
    """
    remedy = "give a configuration in TOML"
    text = read_text(path, max_bytes=_MAX_BYTES, remedy=remedy).removeprefix("\ufeff")
    try:
        for number, line in enumerate(text.split("\n"), start=1):
            if line.count(".") > _MAX_DOTS and not line.lstrip().startswith("#"):
                raise ValueError(f"more than {_MAX_DOTS} dots (at line {number})")
        settings = tomllib.loads(text)
        require_shallow(settings)
        _require_short(settings)
    except RecursionError:
        raise InputError(f"config {path}: nested too deeply; {remedy}") from None
    except ValueError as error:
        raise InputError(f"config {path}: not valid TOML: {brief(error)}") from None
    check_names(settings, allowed, f"config {path}: ")
    return settings


def _require_short(value: object) -> None:
    if isinstance(value, str) and len(value) > _MAX_CHARACTERS:
        raise ValueError(f"a text of {len(value)} characters, the limit is {_MAX_CHARACTERS}")
    if isinstance(value, int) and value.bit_length() > _MAX_BITS:
        raise ValueError(f"a number of {value.bit_length()} bits, the limit is {_MAX_BITS}")
    if isinstance(value, dict | list):
        for item in value.values() if isinstance(value, dict) else value:
            _require_short(item)


def read_section(kind: type, table: object, where: str) -> Any:
    """Reads a section as a dataclass. Its annotations define types and limits, as msgspec
    understands them; a `description` is the error text if one is violated.

    Args:
      kind: the dataclass; `where` is put before its own errors.
      table: its fields by name.
      where: names the section in errors.

    Raises:
      InputError: it is not a table, or a key is unknown (with the nearest known one), or a value is
        bad.
    """
    if not isinstance(table, dict):
        raise InputError(f"{where} must be a section")
    fields = {field.name: field for field in dataclasses.fields(kind)}
    check_names(table, {*fields}, f"{where} ")
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in table:
            raise InputError(f"{where} {name} is missing")
    hints = typing.get_type_hints(kind, include_extras=True)
    try:
        return kind(**{name: _converted(name, value, hints[name]) for name, value in table.items()})
    except InputError as error:
        raise InputError(f"{where} {error}") from None


def _converted(name: str, value: object, hint: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        raise InputError(f"{name} = {value} must be a finite number")
    try:
        return msgspec.convert(value, hint)
    except msgspec.ValidationError:
        expected = _expected(value, msgspec.inspect.type_info(hint))
        raise InputError(f"{name} = {value!r} {expected}") from None


def _expected(value: object, info: msgspec.inspect.Type) -> str:
    """What a value refused by msgspec should be, in words."""
    if isinstance(info, msgspec.inspect.UnionType):  # with None, which TOML lacks
        info = info.types[0]
    description = ""
    if isinstance(info, msgspec.inspect.Metadata):
        description, info = (info.extra_json_schema or {})["description"], info.type
    if isinstance(info, msgspec.inspect.LiteralType):
        return f"must be one of {', '.join(map(str, info.values))}"
    types = {"IntType": int, "FloatType": (int, float), "StrType": str, "BoolType": bool}
    kind = type(info).__name__
    right_type = isinstance(value, types.get(kind, object)) and not isinstance(value, bool)
    kind = kind.removesuffix("Type").lower()
    return description if right_type else f"is not understood; give {TYPE_WORDS.get(kind, kind)}"
