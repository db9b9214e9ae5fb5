"""`python -m tests.placement.hosts.loading DTYPE --hosts=...`: a process that loads its part of a
model, and prints what it has read and held meanwhile."""

from __future__ import annotations

import gc
import json
import math
import sys

import jax
import numpy as np

from ssd_jax import compat
from ssd_jax.checkpoints.weights.load import load_parameters
from ssd_jax.models import sharding
from ssd_jax.placement.hosts.flag import Hosts
from ssd_jax.placement.hosts.start import start
from tests.models.random_weights import Random, made


class Recording(Random):
    """Counts the numbers that are read of each tensor."""

    def __init__(self, model) -> None:
        super().__init__(model)
        self.read_of = dict.fromkeys(self.shapes, 0)

    def read_part(self, name, part):
        self.read_of[name] += math.prod(dimension.stop - dimension.start for dimension in part)
        rng = np.random.default_rng(sum(name.encode()))  # alike in all processes
        return rng.normal(size=self.shapes[name]).astype(np.float32)[part]


def here(arrays) -> int:
    """Bytes that devices of this process have of arrays."""
    return sum(
        math.prod(array.sharding.shard_shape(array.shape))
        * array.dtype.itemsize
        * len(array.sharding.addressable_devices)
        for array in arrays
    )


def live() -> int:
    """Bytes of all arrays on devices of this process."""
    return here(jax.live_arrays())


def main() -> None:
    dtype, hosts = sys.argv[1], sys.argv[2].removeprefix("--hosts=")
    parsed = Hosts.parse(hosts)
    start(parsed, 30, follows=parsed.index > 0)
    model = made(dtype, len(jax.devices()))
    gc.collect()
    source, held, before = Recording(model), [], live()
    found = load_parameters(source, model, where="here", progress=lambda *_: held.append(live()))
    sums = [float(sharding.fully_addressable(array.astype("float32").sum())) for array in found]
    report = {
        "read": source.read_of,
        "sizes": {name: math.prod(shape) for name, shape in source.shapes.items()},
        "cut": [
            name for name, struct in model.checkpoint_structs().items() if not replicated(struct)
        ],
        "held": max(held) - before,
        "weights": here(found),
        "sums": sums,
    }
    print(json.dumps(report))
    compat.leave_job()


def replicated(struct: jax.ShapeDtypeStruct) -> bool:
    return struct.sharding is not None and struct.sharding.is_fully_replicated


if __name__ == "__main__":
    main()
