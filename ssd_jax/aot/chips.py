"""Devices to compile for without having them."""

from __future__ import annotations

import os
from typing import Any

from jax.experimental import topologies

from ssd_jax.errors import InputError

CHIPS = {
    "v4": {8: "v4:2x2x1", 16: "v4:2x2x2"},
    "v5e": {4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"},
    "v5p": {4: "v5p:2x2x1", 8: "v5p:2x2x2"},
    "v6e": {4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
    "tpu7x": {2: "tpu7x:1x1x1", 8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
}
"""libtpu's names of slices, by their number of devices; a chip of v4 and tpu7x has two."""

# Without them libtpu looks for the machine's own chips, and a second process waits for the first.
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


def devices(chip: str, count: int = 1) -> list[Any]:
    """Devices to compile for, of the smallest slice that has so many; nothing can run on them.

    Raises:
      InputError: no slice of this chip has so many, or libtpu is not installed.
    """
    slices = CHIPS[chip]
    sizes = [size for size in slices if size >= count]
    if not sizes:
        raise InputError(
            f"{count} devices of {chip} are more than the largest slice that is compiled for "
            f"has, {max(slices)}"
        )
    os.environ.update({name: os.environ.get(name, value) for name, value in _OFFLINE.items()})
    try:
        slice_ = topologies.get_topology_desc(slices[sizes[0]], platform="tpu")
    except Exception as error:
        raise InputError(
            f"no compiler for {chip}: {error}; `pip install 'ssd-jax[tpu]'` has it"
        ) from None
    return list(slice_.devices[:count])
