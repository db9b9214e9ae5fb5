"""What several hosts do not have."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.errors import InputError
from ssd_jax.placement.hosts.flag import Hosts


def check(settings: DerivedSettings) -> None:
    """Refuses drafts on the devices of one process."""
    if settings.hosts is None:
        return
    Hosts.parse(settings.hosts)
    if settings.draft_devices is not None:
        raise InputError(
            f"draft_devices = {settings.draft_devices!r}: with hosts a draft in a process is on "
            "the leader's processor; leave it out, or use draft_placement = remote:HOST:PORT"
        )
    if settings.prepared == "ssd" and settings.placement_kind not in ("process", "remote"):
        raise InputError(
            f"draft_placement = {settings.draft_placement!r} is for the devices of one process; "
            "with hosts the draft of mode ssd is in one beside the leader, or on another host: "
            "use process or remote:HOST:PORT"
        )
