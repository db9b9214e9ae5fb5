"""Settings that are possible each and impossible together: a file for each subject.

A file has a function `check` of all settings, which raises an `InputError` with the values, what
excludes them and the remedy. Files may have further checks of what is known only later, such as
where the draft came to be.
"""

from __future__ import annotations

from collections.abc import Callable

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.config.refusals import (
    draft,
    fan_out,
    hosts,
    memory,
    models,
    objects,
    placement,
    rules,
    trees,
)

CHECKS: tuple[Callable[[DerivedSettings], None], ...] = (
    memory.check,
    draft.check,
    trees.check,
    rules.check,
    models.check,
    objects.check,
    placement.check,
    hosts.check,
    fan_out.check,
)
"""In their order: the first that refuses is what a user reads."""


def check_together(settings: DerivedSettings) -> None:
    """Refuses settings that exclude each other.

    Raises:
      InputError: some do.
    """
    for check in CHECKS:
        check(settings)
