"""The value of one setting: read from what may stand for it, and checked."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, TypeGuard

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_type

MAX_NUMBER = 2**31 - 1
"""The most that numbers without a limit of their own may be."""
_NUMBER = re.compile("[0-9]{1,18}")


def plain_value(value: Any, kind: str) -> Any:
    """A number as a number, where a setting may be one; else values that stand for text as text."""
    if is_integer(value):
        value = int(value)
    elif isinstance(value, Real) and kind.startswith("float") and not isinstance(value, bool):
        value = float(value)
    if isinstance(value, str):
        value = str(value)  # NumPy's are no plain ones
    if kind.startswith("str"):
        if isinstance(value, list | tuple) and value and all(map(is_integer, value)):
            return ",".join(map(str, value))
        if isinstance(value, Path) or is_integer(value):
            return str(value)
    if kind.startswith("int | str") and isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value)
    return value


def is_integer(value: Any) -> TypeGuard[int]:
    """Whether a value is a whole number, of Python or NumPy, and no truth value."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_value(name: str, value: Any, kind: str, metadata: Mapping[str, Any]) -> None:
    """Refuses a value that a setting cannot have.

    Args:
      kind: its annotation.
      metadata: what `setting` has declared of it.

    Raises:
      InputError: such a value; the message says what is possible.
    """
    within, alternative = metadata["within"], metadata["or_else"]
    if isinstance(value, Collection) and not isinstance(value, str):  # arrays compare by element
        raise InputError(f"{name} = {value!r} is not understood; give one value")
    if metadata["choices"]:
        if not _is_choice(value, metadata["choices"]):
            raise InputError(
                f"{name} = {value!r} is unknown; one of {', '.join(metadata['choices'])}"
            )
        return
    if isinstance(alternative, str):
        if value != alternative and not (is_integer(value) and within[0] <= value <= within[1]):
            either = f"{alternative} or {within[0]} to {within[1]}"
            raise InputError(f"{name} = {value!r} is impossible; give {either}")
        return
    check_type(name, value, kind)
    if within is None or value == alternative:
        return
    low, high = within
    if value < low and high == MAX_NUMBER:
        raise InputError(f"{name} = {value} must be at least {low}")
    if not low <= value <= high:
        greedy = "" if alternative is None else "0 (greedy) or "
        raise InputError(
            f"{name} = {value} is out of range; give {greedy}a value from {low} to {high}"
        )


def kind_of(placement: str) -> str:
    """The part of remote:HOST:PORT before the address."""
    return placement.partition(":")[0]


def _is_choice(value: Any, choices: Sequence[str]) -> bool:
    """Whether a value is one of these; a choice with an address allows any address."""
    kinds = {kind_of(choice) for choice in choices if ":" in choice}
    return value in choices or (isinstance(value, str) and kind_of(value) in kinds)
