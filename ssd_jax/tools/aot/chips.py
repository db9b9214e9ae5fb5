"""Devices to compile for without having them, and their figures.

Bandwidth, arithmetic and GPUs' memory are those that Google and NVIDIA publish for each chip
(https://cloud.google.com/tpu/docs/system-architecture-tpu-vm, the data sheets of GPUs with SXM);
links of TPUs, those of "How to scale your model" (https://jax-ml.github.io/scaling-book/tpus),
which also gives the time of a hop.

XLA queries a GPU before it compiles for it. Here a description answers instead, and the compiler,
which cannot measure, chooses the tiles of products by rules of thumb. None of this has been
compared with a GPU.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.experimental import topologies

from ssd_jax.errors import InputError
from ssd_jax.tools.aot.traffic import Collective, ProgramWork

_GIB = 2**30
_PERMUTE = "collective-permute"
_HOP = 1e-6  # seconds from a device to its neighbour


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chip:
    """A kind of device, as JAX counts devices: a whole chip, of tpu7x one of its two halves.

    Attributes:
      platform: JAX's name of the platform.
      slices: the compiler's names of slices, by number of devices; none for GPUs.
      memory: bytes; of a TPU, those that the compiler leaves to programs.
      bandwidth: of the memory, bytes/s.
      flops: multiplications and additions a second, in bfloat16.
      int8: how many times as fast products of int8 are; of tpu7x not published.
      link: bytes/s that a link carries in one direction; a device sends over two at once.
      options: of the topology.
    """

    platform: str = "tpu"
    slices: Mapping[int, str] = dataclasses.field(default_factory=dict)
    memory: int
    bandwidth: float
    flops: float
    int8: float = 2.0
    link: float
    options: Mapping[str, str] = dataclasses.field(default_factory=dict)


CHIPS: Mapping[str, Chip] = {
    # Without the option libtpu has a device for each of a chip's two cores, unlike any VM.
    "v4": Chip(
        slices={4: "v4:2x2x1", 8: "v4:2x2x2", 16: "v4:2x2x4"},
        options={"chip_config_name": "megacore"},
        memory=int(30.75 * _GIB),
        bandwidth=1228e9,
        flops=275e12,
        int8=1.0,
        link=45e9,
    ),
    "v5e": Chip(
        slices={4: "v5e:2x2", 8: "v5e:2x4", 16: "v5e:4x4"},
        memory=int(15.75 * _GIB),
        bandwidth=819e9,
        flops=197e12,
        link=45e9,
    ),
    "v5p": Chip(
        slices={4: "v5p:2x2x1", 8: "v5p:2x2x2", 16: "v5p:2x2x4"},
        memory=int(95.73 * _GIB),
        bandwidth=2765e9,
        flops=459e12,
        link=90e9,
    ),
    "v6e": Chip(
        slices={4: "v6e:2x2", 8: "v6e:2x4", 16: "v6e:4x4"},
        memory=int(31.24 * _GIB),
        bandwidth=1640e9,
        flops=918e12,
        link=90e9,
    ),
    "tpu7x": Chip(
        slices={2: "tpu7x:1x1x1", 8: "tpu7x:2x2x1", 16: "tpu7x:2x2x2"},
        memory=int(94.74 * _GIB),
        bandwidth=3690e9,
        flops=1153e12,
        link=100e9,
    ),
    # NVLink of H100 carries 450 GB/s in each direction to any other device of the machine.
    "a100": Chip(platform="gpu", memory=85100068864, bandwidth=2039e9, flops=312e12, link=150e9),
    "h100": Chip(platform="gpu", memory=84929347584, bandwidth=3352e9, flops=989e12, link=225e9),
    "h200": Chip(platform="gpu", memory=150000000000, bandwidth=4800e9, flops=989e12, link=225e9),
    "b200": Chip(platform="gpu", memory=191514411008, bandwidth=8000e9, flops=2250e12, link=450e9),
}
TPUS = [name for name, chip in CHIPS.items() if chip.platform == "tpu"]

_GPU = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: {shared}
  threads_per_core_limit: 2048
  core_count: {cores}
  fpus_per_core: {fpus}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: {l2}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  shared_memory_per_block_optin: {shared_optin}
  cuda_compute_capability {{ major: {major} }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""


def _xla_description(name: str, chip: str, **changes: float) -> str:
    """XLA's description of a GPU, by default of Hopper."""
    values = {"cores": 132, "fpus": 128, "clock": 1.98, "major": 9, "l2": 52428800}
    values |= {"shared": 233472, "shared_optin": 232448}
    published = {"memory": CHIPS[chip].memory, "bandwidth": int(CHIPS[chip].bandwidth)}
    return _GPU.format(name=name, **values | published | changes)


_AMPERE = {"cores": 108, "fpus": 64, "clock": 1.41, "major": 8, "l2": 41943040}
_AMPERE |= {"shared": 167936, "shared_optin": 166912}
_BLACKWELL = {"cores": 148, "clock": 1.965, "major": 10, "l2": 132644864}
GPUS = {
    "a100": _xla_description("NVIDIA A100-SXM4-80GB", "a100", **_AMPERE),
    "h100": _xla_description("NVIDIA H100 80GB HBM3", "h100"),
    "h200": _xla_description("NVIDIA H200", "h200"),
    "b200": _xla_description("NVIDIA B200", "b200", **_BLACKWELL),
}
"""XLA's description of each (`stream_executor.GpuTargetConfigProto` as text)."""

_MOST_GPUS = 8  # of a machine, which are joined by NVLink
MAX_ABSENT = 4096
"""Most devices whose sizes are asked for."""

# Without them libtpu looks for the machine's own chips, and a second process waits for the first.
_OFFLINE = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "TPU_WORKER_ID": "0",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Roofline:
    """Lower bounds of a program's seconds, by what it waits for.

    Attributes:
      memory, arithmetic, permutes: the shorter ones hide behind the longest. Permutes bring parts
        from neighbours while products of other parts run.
      links: other transfers between devices, which nothing hides: the next product waits for them.
    """

    memory: float
    arithmetic: float
    permutes: float
    links: float

    @property
    def seconds(self) -> float:
        """Seconds in all."""
        return max(self.memory, self.arithmetic, self.permutes) + self.links

    @property
    def bound(self) -> str:
        """What takes longest."""
        times = dataclasses.asdict(self)
        return max(times, key=lambda name: times[name])


def roofline(chip: Chip, work: ProgramWork, passes: int = 1) -> Roofline:
    """Bounds of a program whose products, but those of int8, take `passes` passes in bfloat16."""
    times = [(c.kind == _PERMUTE, c.runs * _seconds(chip, c)) for c in work.collectives]
    arithmetic = passes * (work.flops - work.of_int8) + work.of_int8 / chip.int8
    return Roofline(
        memory=work.moved / chip.bandwidth,
        arithmetic=arithmetic / chip.flops,
        permutes=sum(seconds for permutes, seconds in times if permutes),
        links=sum(seconds for permutes, seconds in times if not permutes),
    )


def _seconds(chip: Chip, collective: Collective) -> float:
    """Seconds of one collective: of a permute to the neighbours, of others around a ring, both ways
    at once.

    For small arrays the hops take longest. An all-reduce goes around twice.
    """
    if collective.devices < 2:
        return 0.0
    if collective.kind == _PERMUTE:
        return max(collective.nbytes / chip.link, _HOP)
    count = collective.devices
    sent = collective.nbytes * (count - 1) / count / (2 * chip.link)
    return (1 + (collective.kind == "all-reduce")) * max(sent, count / 2 * _HOP)


def chip_named(name: str) -> Chip:
    """Raises: InputError: no chip of this name is known."""
    if name not in CHIPS:
        near = difflib.get_close_matches(name, CHIPS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"one of {', '.join(CHIPS)}"
        raise InputError(f"chip = {name!r} is unknown; {hint}")
    return CHIPS[name]


class AbsentDevice(NamedTuple):
    """Stands for a device in the sizes of arrays, for which no compiler is needed."""

    device_kind: str


def absent_devices(name: str, count: int) -> list[AbsentDevice]:
    """`count` devices of a chip, for sizes alone.

    Raises:
      InputError: no such chip, or more than `MAX_ABSENT`.
    """
    chip_named(name)
    if count > MAX_ABSENT:
        raise InputError(f"devices = {count} is out of range; give 1 to {MAX_ABSENT}")
    return [AbsentDevice({"tpu7x": "TPU7x"}.get(name, name))] * count


def devices(name: str, count: int = 1) -> list[Any]:
    """`count` devices to compile for, of the smallest slice that has them; nothing runs on them.

    Raises:
      InputError: no such chip, no slice or machine with so many, or its compiler is not installed.
    """
    chip = chip_named(name)
    if chip.platform == "gpu":
        if not 1 <= count <= _MOST_GPUS:
            raise InputError(
                f"devices = {count}; give 1 to {_MOST_GPUS}, which is what a machine has, or "
                "compile = false for sizes alone"
            )
        platform, topology, extra = "cuda", name, "cuda-aot"
        options = {"topology": f"1 x 1 x {count}", "target_config": GPUS[name]}
    else:
        sizes = [size for size in chip.slices if size >= count]
        if not sizes:
            raise InputError(
                f"devices = {count} are more than the largest slice of {name} that is compiled for "
                f"has; give at most {max(chip.slices)}, or compile = false for sizes alone"
            )
        platform, topology, extra = "tpu", chip.slices[sizes[0]], "tpu"
        options = chip.options
        os.environ.update({key: os.environ.get(key, value) for key, value in _OFFLINE.items()})
    try:
        slice_ = topologies.get_topology_desc(topology, platform=platform, **options)
    except Exception as error:
        raise InputError(
            f"no compiler for {name}: {error}; `pip install 'ssd-jax[{extra}]'` has it"
        ) from None
    return list(slice_.devices[:count])
