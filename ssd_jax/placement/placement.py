"""Where the two roles run: the choice of a placement, and the devices of each role.

The choice is the user's, or made here for `auto`. No JAX is imported before devices are asked for,
so that bad settings are refused at once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal

from ssd_jax.errors import InputError
from ssd_jax.system.cores import RoleNumbers, shown

if TYPE_CHECKING:
    from jax.sharding import Mesh

Kind = Literal["inline", "submesh", "process"]

_REMEDY = (
    "use draft_placement = 'process', or on a processor ask JAX for more devices by setting "
    "XLA_FLAGS=--xla_force_host_platform_device_count=2 before it starts"
)


class DeviceGroups(RoleNumbers):
    """Devices of the two roles that the user gave, as indices; None is whatever is left."""

    of = "device"

    @property
    def given(self) -> bool:
        """Whether the user said anything."""
        return self.target is not None or self.draft is not None

    def split(self, count: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The devices of target and draft, of `count` that there are.

        Where the user says nothing the target gets the largest power of two below `count`, which
        heads and channels can usually be divided by, and the draft the rest.

        Raises:
          InputError: fewer than two devices, one that does not exist, or none left for a role.
        """
        if count < 2:
            raise InputError(
                "draft_placement = 'submesh' needs two devices, one for each role, and there is "
                f"{count}; {_REMEDY}"
            )
        every = range(count)
        for name, group in (("target_devices", self.target), ("draft_devices", self.draft)):
            missing = {*(group or ())} - {*every}
            if missing:
                raise InputError(
                    f"{name} = {shown(group or ())}: there is no device {shown(missing)}; there "
                    f"are 0 to {count - 1}"
                )
        if self.target is None and self.draft is None:
            share = 1 << ((count - 1).bit_length() - 1)
            return tuple(every[:share]), tuple(every[share:])
        target = self.target or _rest(every, self.draft or (), "draft_devices", "target")
        draft = self.draft or _rest(every, target, "target_devices", "draft")
        return target, draft


def _rest(every: range, taken: Sequence[int], name: str, role: str) -> tuple[int, ...]:
    rest = tuple(index for index in every if index not in taken)
    if not rest:
        raise InputError(
            f"{name} = {shown(taken)} are all devices there are, which leaves none for the {role}; "
            "give fewer"
        )
    return rest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the draft runs, and on which devices both roles do.

    Attributes:
      target, draft: the devices of each role in one mesh axis, where they are in groups; None is
        the default device.
      why: what `auto` chose it for; None where the user did.
    """

    kind: Kind
    target: Mesh | None = None
    draft: Mesh | None = None
    why: str | None = None

    @property
    def cacheable(self) -> bool:
        """Whether compiled programs may be kept on disk: on TPUs, those of devices without the
        first one end the process when they are read again (jax issue 38004)."""
        meshes = [mesh for mesh in (self.target, self.draft) if mesh is not None]
        return all(mesh.devices.flat[0].platform != "tpu" for mesh in meshes)

    def __str__(self) -> str:
        """One line for the user."""
        where = "" if self.why is None else f" ({self.why})"
        if self.target is not None and self.draft is not None:
            where += f": target on {_named(self.target)}, draft on {_named(self.draft)}"
        return f"draft_placement = {self.kind}{where}"


def place(kind: Kind | Literal["auto"], groups: DeviceGroups) -> Placement:
    """The placement of a draft model, as the user wants it; `groups` are those of `submesh`.

    Raises:
      InputError: devices that there are not.
    """
    why = None
    if kind == "auto":
        kind, why = _chosen()
    if kind != "submesh":
        return Placement(kind=kind, why=why)
    import jax

    devices = jax.devices()
    target, draft = groups.split(len(devices))
    return Placement(
        kind="submesh", target=_mesh(devices, target), draft=_mesh(devices, draft), why=why
    )


def _chosen() -> tuple[Kind, str]:
    import jax

    count, platform = len(jax.devices()), jax.default_backend()
    if platform == "cpu":
        return "process", "auto: a process for each role hides more than devices of one process"
    if count > 1:
        return "submesh", f"auto: there are {count} devices"
    return "process", f"auto: there is one {platform} device, so the draft gets the processor"


def _mesh(devices: Sequence[Any], indices: Sequence[int]) -> Mesh:
    import numpy as np
    from jax.sharding import Mesh

    from ssd_jax.models.sharding import MODEL_AXIS

    return Mesh(np.array([devices[index] for index in indices]), (MODEL_AXIS,))


def _named(mesh: Mesh) -> str:
    return ", ".join(f"{device.platform}:{device.id}" for device in mesh.devices.flat)
