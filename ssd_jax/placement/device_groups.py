"""Devices of the two roles: given by the user, or divided by default."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Self

from ssd_jax.errors import InputError
from ssd_jax.placement.visible import MOST_OF_A_PROCESSOR
from ssd_jax.system.cores import RoleNumbers, shown

_IN_PROCESS = "draft_placement = 'process'"
_REMEDY = (
    f"use {_IN_PROCESS} with draft_devices = 'cpu', or on a processor ask JAX for more devices "
    "by setting XLA_FLAGS=--xla_force_host_platform_device_count=2 before it starts"
)


class Grid(NamedTuple):
    """Grid of the target's devices: `data` groups share the slots, the `tensor` devices of a group
    share the model."""

    data: int
    tensor: int

    @classmethod
    def parse(cls, text: str) -> Self:
        """Reads a setting such as "data=2,tensor=4"; an axis that is not named has size 1.

        Raises:
          InputError: the text is not such a setting.
        """
        sizes: dict[str, int] = {}
        for item in text.split(","):
            match = re.fullmatch(r"\s*(data|tensor)=([1-9]\d{0,4})\s*", item)
            if match is None or match[1] in sizes:
                raise InputError(
                    f"mesh = {text!r} is not understood; give sizes of the axes data and tensor, "
                    "such as tensor=4 or data=2,tensor=4"
                )
            sizes[match[1]] = int(match[2])
        return cls(sizes.get("data", 1), sizes.get("tensor", 1))

    @property
    def devices(self) -> int:
        """Number of devices."""
        return self.data * self.tensor

    def __str__(self) -> str:
        return f"data={self.data},tensor={self.tensor}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeviceGroups(RoleNumbers):
    """Device indices of the two roles from the settings; None is the rest.

    Attributes:
      platform: of the draft's devices, "cpu" or "gpu", if the user names it.
    """

    platform: str | None = None
    item: ClassVar[str] = "device"

    @classmethod
    def parse(cls, target: str | None, draft: str | None) -> Self:
        """Reads the two settings; the draft's may name a platform: "cpu", "cpu:0,1", "gpu:1".

        Raises:
          InputError: a setting is not a list of numbers, a processor has no such device, or both
            roles have a device.
        """
        match = re.fullmatch("(cpu|gpu):(.+)", "cpu:0" if draft == "cpu" else draft or "")
        platform, numbers = match.groups() if match else (None, draft)
        if platform != "cpu":
            return dataclasses.replace(super().parse(target, numbers), platform=platform)
        # A target on another platform cannot have the processor's devices.
        groups = super().parse(None, numbers)
        if groups.draft is not None and groups.draft[-1] >= MOST_OF_A_PROCESSOR:
            raise InputError(
                f"draft_devices = {draft!r}: a processor is divided into {MOST_OF_A_PROCESSOR} "
                "devices at most; give lower numbers"
            )
        return dataclasses.replace(
            groups, target=super().parse(target, None).target, platform="cpu"
        )

    def require_platform(self, platform: str | None) -> None:
        """Checks that the draft's platform, if it is named, is this one.

        Raises:
          InputError: it is another.
        """
        if self.platform not in (None, platform):
            raise InputError(
                f"draft_devices are of the platform {self.platform}, where both roles have devices "
                f"of one process; give numbers alone, or use {_IN_PROCESS}"
            )

    def split(
        self, count: int, grid: Grid | None = None, workers: int = 1
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Divides `count` devices between target and draft.

        By default the target gets as many as its grid has, or the largest power of two below
        `count`, which usually divides heads and channels; each of the draft's workers gets a power
        of two of the rest.

        Raises:
          InputError: there are fewer than two devices, one does not exist, none is left for a role,
            or the target's do not fit the grid.
        """
        if count < 2:
            raise InputError(
                "target and draft with devices of their own need two, one for each role, and there "
                f"is {count}; {_REMEDY}"
            )
        if self.target is None and self.draft is None and grid is None:
            target = tuple(range(_power_of_two(count - 1)))
        else:
            target = self.of_target(count, grid)
        if self.draft:
            return target, self.draft
        remaining = _remaining(range(count), target, "target_devices", "draft")
        return target, remaining[: workers * _power_of_two(len(remaining) // workers)]

    def of_target(self, count: int, grid: Grid | None) -> tuple[int, ...]:
        """The target's devices out of `count`: the given ones, or the first that the draft
        leaves.

        Raises:
          InputError: see `split`.
        """
        indices = range(count)
        for name, group in (("target_devices", self.target), ("draft_devices", self.draft)):
            missing = {*(group or ())} - {*indices}
            if missing:
                raise InputError(
                    f"{name} = {shown(group or ())}: there is no device {shown(missing)}; there "
                    f"are 0 to {count - 1}"
                )
        target = self.target or _remaining(indices, self.draft or (), "draft_devices", "target")
        if grid is None:
            return target
        if grid.devices > len(target) or (self.target and grid.devices < len(target)):
            have = "target_devices are" if self.target else "the target can have"
            raise InputError(
                f"mesh = {grid} has {grid.devices} devices, and {have} {len(target)}; change one"
            )
        return target[: grid.devices]


def _power_of_two(limit: int) -> int:
    return 1 << max(limit, 1).bit_length() - 1


def _remaining(indices: range, used: Sequence[int], name: str, role: str) -> tuple[int, ...]:
    remaining = tuple(index for index in indices if index not in used)
    if not remaining:
        raise InputError(
            f"{name} = {shown(used)} are all devices there are, which leaves none for the {role}; "
            "give fewer"
        )
    return remaining


def min_target_devices(groups: DeviceGroups, grid: Grid | None) -> int:
    """Least number of devices that the target takes."""
    if groups.target is not None:
        return len(groups.target)
    return 1 if grid is None else grid.devices
