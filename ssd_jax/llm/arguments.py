"""Checks the arguments of an `LLM` before anything is opened."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from ssd_jax.config.config import Config
from ssd_jax.config.objects import is_object, name_of
from ssd_jax.config.settings import MAX_K
from ssd_jax.config.values import is_integer
from ssd_jax.errors import InputError
from ssd_jax.loading.custom import Custom, is_factory


def check_config(
    target: str | Path | None, config: Config | None, settings: Mapping[str, Any]
) -> Config:
    """The given `Config`, or one made from the settings.

    Raises:
      InputError: both are given, or the settings are bad.
    """
    if config is None:
        arguments: dict[str, Any] = {} if target is None else {"target": target}
        return Config(**arguments, **settings)
    if not isinstance(config, Config):
        raise InputError(f"config = {config!r} is not understood; give a Config")
    if target is not None or settings:
        raise InputError("give either config or settings, not both")
    return config


def split_objects(settings: Mapping[str, Any]) -> tuple[dict[str, Any], Custom]:
    """Settings that name a draft and a policy given as objects, and what makes these.

    Raises:
      InputError: one was given that is made already.
    """
    objects = {
        name: settings[name]
        for name in Custom._fields
        if name in settings and is_factory(name, settings[name])
    }
    return {**settings, **{name: name_of(value) for name, value in objects.items()}}, Custom(
        **objects
    )


def check_objects(config: Config, custom: Custom) -> None:
    """Refuses settings that name objects which were not given, and objects that lack methods.

    Raises:
      InputError: there is one.
    """
    for name, value in custom._asdict().items():
        setting = getattr(config, name)
        if value is None and is_object(setting):
            raise InputError(
                f"{name} = {setting!r} stands for an object of a program, and there is none; give "
                f"it to LLM itself, as {name}=..."
            )
    custom.check(config.prepared)


def check_ks(ks: Iterable[int]) -> tuple[int, ...]:
    """Checked values of K to prepare.

    Raises:
      InputError: impossible values.
    """
    values: tuple[Any, ...] = tuple(ks) if isinstance(ks, Iterable) else (None,)
    if not all(is_integer(k) and 1 <= k <= MAX_K for k in values):
        raise InputError(f"ks = {ks!r} is impossible; give a list of numbers from 1 to {MAX_K}")
    return tuple(map(int, values))


def check_callable(**functions: Callable[..., object] | None) -> None:
    """Raises: InputError: a value is neither None nor callable."""
    for name, value in functions.items():
        if value is not None and not callable(value):
            raise InputError(f"{name} = {value!r} is not understood; give a function")
