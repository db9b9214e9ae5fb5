"""Chips that a compiler knows without having one: sizes, speeds, and devices to compile for."""

from __future__ import annotations

import dataclasses
import os
from typing import Any

from jax.experimental import topologies

from ssd_jax.errors import InputError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """What one device of a chip has, by its maker.

    Attributes:
      name: as users say it.
      memory: bytes of HBM.
      bandwidth: bytes a second of it.
      flops: bfloat16 operations a second.
      topologies: libtpu's names of slices, by their number of devices.
    """

    name: str
    memory: int
    bandwidth: float
    flops: float
    topologies: dict[int, str]


_GIB = 1 << 30
_FLAT = {4: "2x2", 8: "2x4", 16: "4x4"}
_CHIPS = (
    # A chip of these two has two devices.
    Chip(name="v4", memory=16 * _GIB, bandwidth=614e9, flops=137.5e12,
         topologies={8: "v4:2x2x1", 16: "v4:2x2x2"}),
    Chip(name="tpu7x", memory=96 * _GIB, bandwidth=3690e9, flops=1153e12,
         topologies={2: "tpu7x:1x1x1", 8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"}),
    Chip(name="v5e", memory=16 * _GIB, bandwidth=819e9, flops=197e12,
         topologies={count: f"v5e:{shape}" for count, shape in _FLAT.items()}),
    Chip(name="v5p", memory=95 * _GIB, bandwidth=2765e9, flops=459e12,
         topologies={4: "v5p:2x2x1", 8: "v5p:2x2x2"}),
    Chip(name="v6e", memory=32 * _GIB, bandwidth=1640e9, flops=918e12,
         topologies={count: f"v6e:{shape}" for count, shape in _FLAT.items()}),
)  # fmt: skip

CHIPS = {chip.name: chip for chip in _CHIPS}

# Without them libtpu looks for the machine's own chips, and a second process waits for the first.
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(chip: Chip, count: int = 1) -> list[Any]:
    """Devices to compile for, of the smallest slice that has so many; nothing can run on them.

    Raises:
      InputError: no slice of this chip has so many, or libtpu is not installed.
    """
    sizes = [size for size in sorted(chip.topologies) if size >= count]
    if not sizes:
        raise InputError(
            f"{count} devices of {chip.name} are more than the largest slice that is compiled for "
            f"has, {max(chip.topologies)}"
        )
    os.environ.update({name: os.environ.get(name, value) for name, value in _OFFLINE.items()})
    try:
        slice_ = topologies.get_topology_desc(chip.topologies[sizes[0]], platform="tpu")
    except Exception as error:
        raise InputError(
            f"no compiler for {chip.name}: {error}; `pip install 'ssd-jax[tpu]'` has it"
        ) from None
    return list(slice_.devices[:count])
