"""Cores, devices, files and workers that mean nothing where the draft runs."""

from __future__ import annotations

from ssd_jax.config.derived import DerivedSettings
from ssd_jax.errors import InputError
from ssd_jax.placement.placement import Placement
from ssd_jax.wire.security import ENGINE_SETTINGS


def check(settings: DerivedSettings) -> None:
    """Refuses what the setting `draft_placement` has no use for."""
    addresses = settings.draft_addresses
    for address in addresses:
        settings.draft_files.check(address, serves=False)
    if addresses and settings.draft_workers not in (None, len(addresses)):
        raise InputError(
            f"draft_workers = {settings.draft_workers}, and draft_placement = "
            f"{settings.draft_placement!r} names {len(addresses)}; leave draft_workers out"
        )
    if settings.draft_split not in (None, "auto") and settings.workers == 1:
        raise InputError(
            f"draft_split = {settings.draft_split!r} is for several workers; give draft_workers, "
            "or the addresses of several"
        )
    if not addresses and any(settings.draft_files):
        name = next(
            n for n, path in zip(ENGINE_SETTINGS, settings.draft_files, strict=True) if path
        )
        raise InputError(f"{name} is for draft_placement = 'remote:HOST:PORT'; leave it out")
    if settings.cores.draft is not None and settings.placement_kind not in ("process", "auto"):
        raise InputError(
            f"draft_cores = {settings.draft_cores!r} is for draft_placement = 'process'; elsewhere "
            "the draft shares the target's process"
        )
    settings.device_groups  # noqa: B018 (checks)
    if settings.draft_devices is not None and settings.placement_kind in ("inline", "remote"):
        raise InputError(
            f"draft_devices = {settings.draft_devices!r} is for a draft elsewhere on this host, "
            f"and this is draft_placement = {settings.draft_placement!r}; change that, or leave "
            "the devices out"
        )
    if settings.grid is not None and settings.slots % settings.grid.data:
        raise InputError(
            f"slots = {settings.slots} cannot be shared evenly by the {settings.grid.data} groups "
            f"of mesh = {settings.mesh!r}; give a multiple"
        )
    settings.smaller_batches  # noqa: B018 (checks)


def check_workers(settings: DerivedSettings, placement: Placement) -> None:
    """Refuses several workers where the draft came to be; devices of one process only share slots.

    Args:
      placement: of target and draft, known only once the devices are.

    Raises:
      InputError: workers that cannot share the work there.
    """
    if settings.workers == 1:
        return
    setting = f"draft_workers = {settings.workers}"
    if placement.out_of_process:
        return
    if placement.kind == "inline":
        raise InputError(
            f"{setting} is for a draft elsewhere, and this is {placement}; leave it out, or "
            "use draft_placement = 'process'"
        )
    if settings.draft_split == "branches":
        raise InputError(
            f"draft_split = 'branches' is for a draft in processes, and this is {placement}; "
            "leave it out, or use draft_placement = 'process'"
        )
    if settings.slots % settings.workers:
        raise InputError(
            f"slots = {settings.slots} cannot be shared evenly by {setting} in a submesh; give a "
            "multiple"
        )
    data = 1 if settings.grid is None else settings.grid.data
    if (settings.kv_memory or settings.page_size) and data != settings.workers:
        raise InputError(
            f"{setting} in a submesh have pages for their own slots, and so must the target's "
            f"groups be as many where slots share pages: give mesh = 'data={settings.workers}', "
            "or leave kv_memory and page_size out"
        )


def check_cores(settings: DerivedSettings, placement: Placement) -> None:
    """Refuses cores for a draft that came to be in the target's process.

    Raises:
      InputError: there are some.
    """
    if settings.cores.draft is not None and placement.kind != "process":
        raise InputError(
            f"draft_cores = {settings.draft_cores!r} is for a draft in a process, and here "
            f"{placement}; leave it out, or use draft_placement = 'process'"
        )
