"""Lists of branches that do not fit."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.config.objects import is_object
from ssd_jax.errors import InputError


def check(settings: DerivedSettings) -> None:
    """Refuses a list for another K or M, or where these are chosen."""
    if settings.prepared != "ssd":
        return
    budgets = settings.budgets_at()
    names = ["k"] * settings.chooses_k + ["budget"] * (len(budgets) > 1)
    if names and settings.fan_out is not None and "," in settings.fan_out:
        raise InputError(
            f"fan_out = {settings.fan_out!r} lists branches for one k and budget, and "
            f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} chosen while "
            "decoding; give numbers for them, or a policy such as measured"
        )
    if not is_object(settings.fan_out):
        settings.fan_out_of(settings.speculated, max(budgets))
