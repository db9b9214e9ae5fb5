"""What means nothing with the draft, or with none."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.config.objects import is_object
from ssd_jax.config.settings import MEANINGLESS
from ssd_jax.errors import InputError


def check(settings: DerivedSettings) -> None:
    """Refuses a mode without its draft, and settings that mean nothing with mode or draft."""
    remedies = {
        "ssd": "needs a draft model: `draft='default'` (the one that comes with the package), "
        "or a model source; `draft='ngram'` is for `mode='sd'`",
        "sd": "needs a draft: `draft='ngram'`, `draft='default'` (the one that comes with the "
        "package), or a model source",
        "auto": "finds out whether a draft pays; give one, `draft='ngram'`, `draft='default'` "
        "(the one that comes with the package) or a model source, or use `mode='ar'`",
    }
    model_or_object = settings.draft_model or is_object(settings.draft)
    draft = model_or_object if settings.mode == "ssd" else settings.draft
    if settings.mode in remedies and not draft:
        raise InputError(f"mode = {settings.mode!r} {remedies[settings.mode]}")
    for (setting, value), names in MEANINGLESS.items():
        for name in names if getattr(settings, setting) == value else ():
            if getattr(settings, name) is not None:
                raise InputError(
                    f"{name} = {getattr(settings, name)!r} means nothing with {setting} = "
                    f"{value!r}; leave out one"
                )
