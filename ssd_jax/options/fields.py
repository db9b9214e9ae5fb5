"""Settings by name: which ones a dataclass or a function takes, and errors about others."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import numbers
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.system.files import nearest, shown

TYPE_WORDS = {"int": "an integer", "float": "a number", "bool": "true or false", "str": "text"}
"""What a value should be, in words, by type."""

_TYPES = {
    "None": type(None),
    "bool": bool,
    "int": numbers.Integral,
    "float": numbers.Real,
    "str": str,
}
T = TypeVar("T", bound=Callable[..., Any])
D = TypeVar("D")


def with_field_help(settings: type[D]) -> type[D]:
    """Puts the help of a dataclass's fields into its docstring."""
    fields = dataclasses.fields(settings)  # pyright: ignore[reportArgumentType]
    lines = "\n".join(f"  {field.name}: {field.metadata['help']}." for field in fields)
    settings.__doc__ = f"{inspect.cleandoc(settings.__doc__ or '')}\n\nAttributes:\n{lines}"
    return settings


def immutable(settings: type[D]) -> type[D]:
    """Makes an assignment to a field of a frozen dataclass an `InputError` with a remedy."""

    def refuse(self: object, name: str, value: object) -> None:
        raise InputError(
            f"{name} = {value!r}: {type(self).__name__} does not change; write "
            f"dataclasses.replace(..., {name}={value!r}), which returns another"
        )

    settings.__setattr__ = refuse  # pyright: ignore[reportAttributeAccessIssue]
    return settings


def check_keywords(hints: Mapping[str, str] | None = None) -> Callable[[T], T]:
    """Makes a function refuse unknown keyword arguments with an `InputError`.

    Args:
      hints: what to say about unknown names that may be expected.
    """

    def decorate(call: T) -> T:
        names = {*inspect.signature(call).parameters} - {"self"}

        @functools.wraps(call)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            check_names(keywords, names, hints=hints)
            return call(*args, **keywords)

        return wrapper  # pyright: ignore[reportReturnType]

    return decorate


def canonical_names(settings: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    """Settings by canonical names; `aliases` maps other names to those.

    Raises:
      InputError: a setting is given by both names.
    """
    for alias, name in aliases.items():
        if alias in settings and name in settings:
            raise InputError(f"{alias} and {name} are two names of one setting; give one")
    return {aliases.get(key, key): value for key, value in settings.items()}


def check_names(
    settings: Mapping[str, Any],
    allowed: Collection[str],
    where: str = "",
    *,
    hints: Mapping[str, str] | None = None,
) -> None:
    """Refuses a name that is not a setting, with its text in `hints` or the nearest name.

    Raises:
      InputError: a name is unknown.
    """
    for key in settings:
        if key not in allowed:
            near = nearest(key, sorted(allowed))
            hint = f"did you mean {near!r}?" if near else f"known: {', '.join(sorted(allowed))}"
            hint = (hints or {}).get(key, hint)
            raise InputError(f"{where}unknown key {shown(key)}; {hint}")


def check_type(name: str, value: object, kind: str) -> None:
    """Refuses a value of another type.

    Args:
      kind: an annotation such as "int | None"; annotations with other types accept anything.

    Raises:
      InputError: the type is another; the message has the name, the value and what is accepted.
    """
    kinds = kind.split(" | ")
    if not all(kind in _TYPES for kind in kinds):
        return
    is_bool = isinstance(value, bool) and "bool" not in kinds
    if is_bool or not isinstance(value, tuple(_TYPES[kind] for kind in kinds)):
        expected = " or ".join(TYPE_WORDS[kind] for kind in kinds if kind != "None")
        raise wrong_value(name, value, expected)


def wrong_value(name: str, value: object, expected: str) -> InputError:
    """The error about a value of the wrong type."""
    return InputError(f"{name} = {value!r} is not understood; give {expected}")
