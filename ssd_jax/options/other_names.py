"""Names that other programs give to settings: renamed, translated, or refused with a remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_names, renamed

Given = Mapping[str, Any]
T = TypeVar("T")


class SameAs(NamedTuple):
    """Another name of a setting, with the same values."""

    setting: str


class Translated(NamedTuple):
    """A name whose value means settings.

    Attributes:
      settings: from the value and everything that was given, the settings.
      help: what is given, for completion.
    """

    settings: Callable[[Any, Given], dict[str, Any]]
    help: str


class NotHere(NamedTuple):
    """A name without a setting.

    Attributes:
      instead: what to do, in words.
      harmless: values that ask for what holds here anyway.
    """

    instead: str
    harmless: tuple[Any, ...] = (None,)


Names = Mapping[str, SameAs | Translated | NotHere]


def same_as(names: Names) -> dict[str, str]:
    """The names that are other names of a setting, with that."""
    return {name: known.setting for name, known in names.items() if isinstance(known, SameAs)}


def settings_of(
    given: Given, names: Names, where: str = "", *, beside: Given | None = None
) -> dict[str, Any]:
    """Settings by our names alone; names that are not in the table stay.

    Args:
      where: begins errors.
      beside: what was given in all, where `given` is a part; for `Translated`.

    Raises:
      InputError: a setting is given by two names, a value is not understood, or a name asks for
        what is not here.
    """
    found = renamed(given, same_as(names))
    everything = given if beside is None else beside
    for name, value in given.items():
        known = names.get(name)
        if isinstance(known, NotHere):
            del found[name]
            if not _is_one_of(value, known.harmless):
                raise InputError(f"{where}{name} = {value!r} means nothing here: {known.instead}")
        elif isinstance(known, Translated):
            del found[name]
            for ours, setting in known.settings(value, everything).items():
                if ours in found:
                    raise InputError(f"{where}{name} and {ours} say the same thing; give one")
                found[ours] = setting
    return found


def _is_one_of(value: Any, harmless: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, where True is no 1."""
    return any(type(value) in (type(each), float) and value == each for each in harmless)


def taking(names: Names) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass take these names, too, and refuse unknown ones with an `InputError`."""

    def decorated(settings: type[T]) -> type[T]:
        made: Any = settings
        plain = made.__init__
        ours = {*inspect.signature(plain).parameters} - {"self"}

        @functools.wraps(plain)
        def init(self: Any, *args: Any, **given: Any) -> None:
            check_names(given, ours | names.keys())
            plain(self, *args, **settings_of(given, names))

        made.__init__ = init
        return settings

    return decorated
