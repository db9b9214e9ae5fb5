"""What objects of the program, as draft or policy, have no part in."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.config.objects import is_object
from ssd_jax.config.settings import OF_MODELS
from ssd_jax.errors import InputError


def check(settings: DerivedSettings) -> None:
    """Refuses settings of models, measured choices and other processes."""
    for name in ("draft", "fan_out"):
        if is_object(getattr(settings, name)) and settings.hosts is not None:
            raise InputError(
                f"hosts = {settings.hosts!r}: other processes do not have the object {name} = "
                f"{getattr(settings, name)!r}; leave out one"
            )
    if not is_object(settings.draft):
        return
    for name in OF_MODELS:
        if getattr(settings, name) is not None:
            raise InputError(
                f"{name} = {getattr(settings, name)!r} is for a draft model, and draft = "
                f"{settings.draft!r} is an object of this process; leave it out"
            )
    for name, remedy in (("mode", "sd or ssd"), ("k", "a number"), ("budget", "a number")):
        if getattr(settings, name) == "auto":
            raise InputError(
                f"{name} = 'auto' is chosen by measured costs, and those of an object, draft = "
                f"{settings.draft!r}, are not measured; give {remedy}"
            )
