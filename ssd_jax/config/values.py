"""The value of one setting: read from what may stand for it, and checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_type

MOST = 2**31 - 1
"""The most that numbers without a limit of their own may be."""
_NUMBER = re.compile("[0-9]{1,18}")


def plain_value(value: Any, kind: str) -> Any:
    """A number as a number, where a setting may be one; else values that stand for text as text."""
    if _is_whole(value):
        value = int(value)
    elif isinstance(value, Real) and kind.startswith("float") and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, str):
        value = str(value)  # NumPy's are no plain ones
    if kind.startswith("str"):
        if isinstance(value, list | tuple) and value and all(map(_is_whole, value)):
            return ",".join(map(str, value))
        if isinstance(value, Path) or _is_whole(value):
            return str(value)
    if kind.startswith("int | str") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value


def _is_whole(value: Any) -> TypeGuard[Integral]:
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_value(name: str, value: Any, kind: str, about: Mapping[str, Any]) -> None:
    """Refuses a value that a setting cannot have.

    Args:
      kind: its annotation.
      about: its metadata, see `setting`.

    Raises:
      InputError: such a value; the message says what is possible.
    """
    within, other = about["within"], about["or_else"]
    if isinstance(value, Collection) and not isinstance(value, str):  # arrays compare by element
        raise InputError(f"{name} = {value!r} is not understood; give one value")
    if about["choices"]:
        if not _is_of(value, about["choices"]):
            raise InputError(f"{name} = {value!r} is unknown; one of {', '.join(about['choices'])}")
        return
    if isinstance(other, str):
        if value != other and not (_is_whole(value) and within[0] <= value <= within[1]):
            either = f"{other} or {within[0]} to {within[1]}"
            raise InputError(f"{name} = {value!r} is impossible; give {either}")
        return
    check_type(name, value, kind)
    if within is None or value == other:
        return
    least, most = within
    if value < least and most == MOST:
        raise InputError(f"{name} = {value} must be at least {least}")
    if not least <= value <= most:
        greedy = "" if other is None else "0 (greedy) or "
        raise InputError(
            f"{name} = {value} is out of range; give {greedy}a value from {least} to {most}"
        )


def kind_of(placement: str) -> str:
    """The part of remote:HOST:PORT before the address."""
    return placement.partition(":")[0]


def _is_of(value: Any, choices: Sequence[str]) -> bool:
    """Whether a value is one of these; a choice with an address allows any address."""
    kinds = {kind_of(choice) for choice in choices if ":" in choice}
    return value in choices or (isinstance(value, str) and kind_of(value) in kinds)
