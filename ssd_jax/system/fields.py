"""Fields of dataclasses of settings: their help, and what values they take."""

from __future__ import annotations

import dataclasses
import inspect
import numbers
from typing import TypeVar

from ssd_jax.errors import InputError

WANTED = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
"""By type: what a value should be, in words."""

_ACCEPTED = {
    "None": type(None),
    "bool": bool,
    "int": numbers.Integral,
    "float": numbers.Real,
    "str": str,
}
D = TypeVar("D")


def documented(settings: type[D]) -> type[D]:
    """Puts the help of a dataclass's fields into its docstring."""
    fields = dataclasses.fields(settings)  # pyright: ignore[reportArgumentType]
    lines = "\n".join(f"  {field.name}: {field.metadata['help']}." for field in fields)
    settings.__doc__ = f"{inspect.cleandoc(settings.__doc__ or '')}\n\nAttributes:\n{lines}"
    return settings


def check_type(name: str, value: object, kind: str) -> None:
    """Refuses a value of another type.

    Args:
      kind: an annotation such as "int | None"; those of other types than these take anything.

    Raises:
      InputError: the name, its value and what it takes.
    """
    kinds = kind.split(" | ")
    if not all(kind in _ACCEPTED for kind in kinds):
        return
    mixed_up = isinstance(value, bool) and "bool" not in kinds
    if mixed_up or not isinstance(value, tuple(_ACCEPTED[kind] for kind in kinds)):
        wanted = " or ".join(WANTED[kind] for kind in kinds if kind != "None")
        raise not_understood(name, value, wanted)


def not_understood(name: str, value: object, wanted: str) -> InputError:
    """The error of a value of the wrong type."""
    return InputError(f"{name} = {value!r} is not understood; give {wanted}")
