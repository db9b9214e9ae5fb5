"""Where the two roles run: the choice of a placement, and the devices of each role.

The user chooses the placement, or `auto` leaves the choice to this module. JAX is imported only
when devices are asked for, so that bad settings are refused at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ssd_jax.errors import InputError
from ssd_jax.placement.device_groups import DeviceGroups, Grid, min_target_devices
from ssd_jax.placement.parallel.layout import Layout
from ssd_jax.placement.visible import PROCESSOR, Devices, count_gpus
from ssd_jax.system.cores import shown
from ssd_jax.wire.address import Address

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from ssd_jax.system.compile_cache import ProgramStore

Kind = Literal["inline", "submesh", "process", "remote"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the draft runs, and on which devices both roles do.

    Attributes:
      target, draft: the mesh of each role, see `sharding.mesh_of`; None is the default device.
      why: why `auto` chose this placement; None where the user chose it.
      addresses: of workers on other hosts.
      workers: devices of each of the draft's processes.
      layout: how workers share the work.
      visible: GPUs that JAX is restricted to in this process; None where it is not restricted.
    """

    kind: Kind
    target: Mesh | None = None
    draft: Mesh | None = None
    why: str | None = None
    addresses: tuple[Address, ...] = ()
    workers: tuple[Devices, ...] = (PROCESSOR,)
    layout: Layout = Layout()  # noqa: RUF009 (immutable)
    visible: Devices | None = None

    @property
    def out_of_process(self) -> bool:
        """Whether the draft of mode ssd runs in another process, on this host or another."""
        return self.kind in ("process", "remote")

    @property
    def draft_platform(self) -> str | None:
        """JAX's name of the platform of the draft's devices; None if they are on another host."""
        import jax

        if self.kind == "process":
            return self.workers[0].platform
        return None if self.kind == "remote" else jax.default_backend()

    def worker_attention(self, attention: str) -> str:
        """The attention setting of a draft in its own process, given the target's: on a platform
        other than the target's, the draft uses that platform's own backend."""
        import jax

        is_other = self.kind == "process" and self.workers[0].platform != jax.default_backend()
        return "auto" if is_other and attention != "xla" else attention

    @property
    def cacheable(self) -> bool:
        """Whether compiled programs may be cached on disk: on TPUs, programs for devices without
        the first one end the process when they are read back (jax issue 38004)."""
        meshes = [mesh for mesh in (self.target, self.draft) if mesh is not None]
        return all(mesh.devices.flat[0].platform != "tpu" for mesh in meshes)

    def use_store(self, store: ProgramStore | None) -> Path | None:
        """Keeps compiled programs in the store, unless they are not cacheable; returns its path.

        Another model of this process may have changed that.
        """
        from ssd_jax.system import compile_cache

        return compile_cache.use_store(store) if self.cacheable else compile_cache.use_no_cache()

    def __str__(self) -> str:
        """One line for the user."""
        reason = "" if self.why is None else f" ({self.why})"
        roles = [f"{role} on {', '.join(names)}" for role, names in self.devices.items()]
        if self.addresses:
            roles.append(f"draft at {', '.join(map(str, self.addresses))}")
        if self.layout.workers > 1:
            roles.append(str(self.layout))
        return f"draft_placement = {self.kind}{reason}{': ' * bool(roles)}{', '.join(roles)}"

    @property
    def devices(self) -> dict[str, tuple[str, ...]]:
        """Names of each role's own devices, in mesh order; roles without their own are left out."""
        names_by_role = {}
        if self.visible is not None:
            names_by_role["target"] = self.visible.names
        elif self.target is not None:
            names_by_role["target"] = _names(self.target)
        if any(worker != PROCESSOR for worker in self.workers):
            names_by_role["draft"] = tuple(name for worker in self.workers for name in worker.names)
        elif self.draft is not None and self.draft != self.target:
            names_by_role["draft"] = _names(self.draft)
        return names_by_role


def place(
    kind: Kind | Literal["auto"],
    groups: DeviceGroups,
    grid: Grid | None = None,
    addresses: tuple[Address, ...] = (),
    *,
    workers: int = 1,
    hosts: bool = False,
) -> Placement:
    """The placement of both roles, from the user's settings.

    Args:
      kind: the draft's placement.
      groups: devices of the roles.
      grid: layout of the target's devices; None is one device, or a row of all its devices.
      addresses: of workers on other hosts.
      workers: number of the draft's processes, or of groups of its devices in a submesh.
      hosts: whether the target's devices, by default all, belong to several processes.

    Raises:
      InputError: a device does not exist, or a process has none.
    """
    # With hosts, JAX has already started and sees all devices.
    why, gpus = None, count_gpus() if kind in ("auto", "process") and not hosts else 0
    if kind == "auto":
        kind, why = _choose_auto(groups, grid, gpus)
    if kind == "process" and not hosts:
        return _place_in_processes(groups, grid, gpus, why, workers)
    if kind != "submesh" and groups.target is None and grid is None and not hosts:
        return Placement(kind=kind, why=why, addresses=addresses)
    import jax

    devices, draft_indices = jax.devices(), None
    if kind == "submesh":
        groups.require_platform("gpu" if jax.default_backend() == "gpu" else None)
        indices, draft_indices = groups.split(len(devices), grid, workers)
    else:
        indices = groups.of_target(len(devices), grid)
    if hosts:
        _check_hosts(devices, indices)
    target = _mesh(devices, indices, grid)
    draft = target if kind == "inline" or hosts else None  # in mode sd it is always there
    if draft_indices is not None:
        size = _devices_per_worker(draft_indices, workers)
        draft = _mesh(devices, draft_indices, Grid(workers, size))
    return Placement(
        kind=kind,
        target=target,
        draft=draft,
        why=why,
        addresses=addresses,
        workers=(PROCESSOR,) * workers,
    )


def _check_hosts(devices: Sequence[Any], indices: Sequence[int]) -> None:
    hosts = [device.process_index for device in devices]
    idle = {*hosts} - {hosts[index] for index in indices}
    if idle:
        raise InputError(
            f"the target has devices {shown(indices)}, and host {shown(idle)} has none of them: "
            f"devices 0 to {len(hosts) - 1} are of hosts {', '.join(map(str, hosts))}; give every "
            "host some by mesh or target_devices, or start fewer"
        )


def _place_in_processes(
    groups: DeviceGroups, grid: Grid | None, gpus: int, why: str | None, workers: int
) -> Placement:
    """Gives the draft's processes the GPUs that the target leaves, or the processor; with the
    draft on GPUs, this process starts JAX with the target's GPUs alone."""
    import jax

    platform = groups.platform
    if platform is None and gpus:
        platform = "gpu" if groups.draft or min_target_devices(groups, grid) < gpus else "cpu"
    if platform == "gpu" and not gpus:
        raise InputError(
            f"draft_devices = gpu:{shown(groups.draft or ())}: JAX has no NVIDIA GPU here; give "
            "other devices, or install JAX for CUDA"
        )
    if platform == "gpu":
        target_numbers, draft_numbers = groups.split(gpus, grid, workers)
        worker_devices = _divide(Devices("gpu", draft_numbers), workers)
        target = Devices("gpu", target_numbers)
        target.claim()
        devices, is_single = target.start(), len(target_numbers) == 1 and grid is None
        return Placement(
            kind="process",
            target=None if is_single else _mesh(devices, range(len(devices)), grid),
            why=why,
            workers=worker_devices,
            visible=target,
        )
    if platform is None and groups.draft and jax.default_backend() != "cpu":
        raise InputError(
            f"draft_devices = {shown(groups.draft)}: a draft in a process has NVIDIA GPUs or the "
            f"processor, and devices here are {jax.default_backend()}; use draft_placement = "
            "'submesh', or draft_devices = 'cpu'"
        )
    if platform is None and groups.draft:
        raise InputError(
            f"draft_devices = {shown(groups.draft)}: numbers alone are of NVIDIA GPUs, and JAX has "
            f"none here; give cpu:{shown(groups.draft)} for parts of the processor"
        )
    worker_devices = (PROCESSOR,) * workers
    if groups.draft:
        worker_devices = _divide(Devices("cpu", groups.draft), workers)
    mesh = None
    if groups.target is not None or grid is not None:
        devices = jax.devices()
        indices = dataclasses.replace(groups, draft=None).of_target(len(devices), grid)
        mesh = _mesh(devices, indices, grid)
    return Placement(kind="process", target=mesh, why=why, workers=worker_devices)


def _divide(devices: Devices, workers: int) -> tuple[Devices, ...]:
    """Divides devices evenly among workers."""
    numbers, size = devices.numbers, _devices_per_worker(devices.numbers, workers)
    return tuple(
        Devices(devices.platform, numbers[begin : begin + size])
        for begin in range(0, len(numbers), size)
    )


def _devices_per_worker(numbers: Sequence[int], workers: int) -> int:
    size = len(numbers) // workers
    if size * workers != len(numbers):
        raise InputError(
            f"draft_workers = {workers} cannot share the draft's {len(numbers)} devices "
            f"({shown(numbers)}) evenly; give a divisor, or other draft_devices"
        )
    return size


def _choose_auto(groups: DeviceGroups, grid: Grid | None, gpus: int) -> tuple[Kind, str]:
    note = ""
    if groups.platform == "cpu":  # without asking JAX
        return choose(groups, grid, "cpu", 1)
    if min_target_devices(groups, grid) < gpus:
        if Devices("gpu", groups.split(gpus, grid)[0]).claimable():
            return choose(groups, grid, "gpu", gpus, claimable=True)
        note = ", and JAX has started with all of them"
    import jax

    return choose(groups, grid, jax.default_backend(), len(jax.devices()), note)


def choose(
    groups: DeviceGroups,
    grid: Grid | None,
    platform: str,
    count: int,
    note: str = "",
    *,
    claimable: bool = False,
) -> tuple[Kind, str]:
    """The kind that `auto` chooses for `count` devices of a platform, and why.

    Args:
      note: text added about these devices.
      claimable: whether each process can have some devices to itself, as with NVIDIA GPUs.
    """
    target_count = min_target_devices(groups, grid)
    if groups.platform == "cpu":
        return "process", "auto: the draft gets the processor"
    if claimable and target_count < count:
        why = f"auto: there are {count} GPUs, and no one has measured that submesh overlaps there"
        return "process", why
    if platform == "cpu":
        return "process", "auto: a process for each role hides more than devices of one process"
    if target_count < count:
        return "submesh", f"auto: there are {count} devices{note}"
    reason = f"the target has all {count} devices"
    if count == 1:
        reason = f"there is one {platform} device"
    return "process", f"auto: {reason}, so the draft gets the processor"


def _mesh(devices: Sequence[Any], indices: Sequence[int], grid: Grid | None = None) -> Mesh:
    from ssd_jax.models.sharding import mesh_of

    return mesh_of([devices[index] for index in indices], 1 if grid is None else grid.data)


def _names(mesh: Mesh) -> tuple[str, ...]:
    return tuple(f"{device.platform}:{device.id}" for device in mesh.devices.flat)
