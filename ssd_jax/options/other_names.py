"""Names that other programs give to settings: renamed, translated, or refused with a remedy."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from ssd_jax.errors import InputError
from ssd_jax.options.fields import canonical_names, check_names

Settings = Mapping[str, Any]
T = TypeVar("T")


class SameAs(NamedTuple):
    """Another name of a setting, with the same values."""

    setting: str


class Translated(NamedTuple):
    """A name whose value means settings.

    Attributes:
      settings: canonical settings, from the value and all settings of the caller.
    """

    settings: Callable[[Any, Settings], dict[str, Any]]


class Unsupported(NamedTuple):
    """A name without a setting.

    Attributes:
      remedy: what to do, in words.
      accepted: values that ask for nothing but what always holds.
    """

    remedy: str
    accepted: tuple[Any, ...] = (None,)


Names = Mapping[str, SameAs | Translated | Unsupported]


def aliases_of(names: Names) -> dict[str, str]:
    """The setting of each name that is another name of one."""
    return {name: entry.setting for name, entry in names.items() if isinstance(entry, SameAs)}


def canonical_settings(
    settings: Settings, names: Names, where: str = "", *, context: Settings | None = None
) -> dict[str, Any]:
    """Settings by canonical names; names that are not in the table stay.

    Args:
      where: begins errors.
      context: all settings of the caller, of which these may be a part; for `Translated`.

    Raises:
      InputError: a setting is given by two names, a value is not understood, or a name asks for
        what is not supported.
    """
    resolved = canonical_names(settings, aliases_of(names))
    context_settings = settings if context is None else context
    for name, value in settings.items():
        entry = names.get(name)
        if isinstance(entry, Unsupported):
            del resolved[name]
            if not _is_one_of(value, entry.accepted):
                raise InputError(f"{where}{name} = {value!r} means nothing here: {entry.remedy}")
        elif isinstance(entry, Translated):
            del resolved[name]
            for canonical_name, setting in entry.settings(value, context_settings).items():
                if canonical_name in resolved:
                    raise InputError(
                        f"{where}{name} and {canonical_name} say the same thing; give one"
                    )
                resolved[canonical_name] = setting
    return resolved


def _is_one_of(value: Any, accepted: tuple[Any, ...]) -> bool:
    """Whether a value is one of these, where True is no 1."""
    return any(type(value) in (type(entry), float) and value == entry for entry in accepted)


def accept_names(names: Names) -> Callable[[type[T]], type[T]]:
    """Makes a dataclass accept these names, too, and refuse unknown ones with an `InputError`."""

    def decorate(settings: type[T]) -> type[T]:
        cls: Any = settings
        original_init = cls.__init__
        fields = {*inspect.signature(original_init).parameters} - {"self"}

        @functools.wraps(original_init)
        def init(self: Any, *args: Any, **keywords: Any) -> None:
            check_names(keywords, fields | names.keys())
            original_init(self, *args, **canonical_settings(keywords, names))

        cls.__init__ = init
        return settings

    return decorate
