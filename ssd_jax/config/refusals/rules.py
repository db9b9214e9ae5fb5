"""What verification rules have no use for."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.errors import InputError
from ssd_jax.sampling.rules import RULES

_READ_Q = "verify = " + " or ".join(repr(name) for name, rule in RULES.items() if rule.ships_q)


def check(settings: DerivedSettings) -> None:
    """Refuses settings of q under a rule that reads none."""
    if not RULES[settings.verify].ships_q and settings.proposal_support == "full":
        raise InputError(
            f"proposal_support = 'full' is for {_READ_Q}; {settings.verify} proposals ship no q"
        )
    if not RULES[settings.verify].ships_q and settings.saguaro_c not in (None, 1):
        raise InputError(
            f"saguaro_c = {settings.saguaro_c} is for {_READ_Q}; {settings.verify} proposals have "
            "no residual to move"
        )
