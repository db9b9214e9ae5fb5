"""GPUs to compile for without having them.

XLA asks a GPU what it has before it compiles for it; here a description answers instead. Memory and
bandwidth are about those that NVIDIA publishes; nothing here has been compared with a GPU.
"""

from __future__ import annotations

from typing import Any

from jax.experimental import topologies

from ssd_jax.errors import InputError

MOST = 8
"""Devices of a machine, which are joined by NVLink."""

_HOPPER = """
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: {bandwidth}
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: {memory}
  shared_memory_per_block_optin: 232448
  cuda_compute_capability {{ major: 9 }}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 12 }}
runtime_version {{ major: 13 }}
device_description_str: "{name}"
"""

GPUS = {
    "h100": _HOPPER.format(
        bandwidth=3352320000000, memory=84929347584, name="NVIDIA H100 80GB HBM3"
    ),
    "h200": _HOPPER.format(bandwidth=4800000000000, memory=150000000000, name="NVIDIA H200"),
}
"""XLA's description of each (`stream_executor.GpuTargetConfigProto` as text)."""


def devices(name: str, count: int = 1) -> list[Any]:
    """Devices of one machine, of a name in `GPUS`, to compile for; nothing can run on them.

    The compiler chooses tiles of products by rules of thumb, for it can measure none.

    Raises:
      InputError: too many of them, or JAX's plugin for CUDA is not installed.
    """
    if not 1 <= count <= MOST:
        raise InputError(f"devices = {count}; give 1 to {MOST}, which is what a machine has")
    try:
        found = topologies.get_topology_desc(
            name, platform="cuda", topology=f"1 x 1 x {count}", target_config=GPUS[name]
        )
    except Exception as error:
        raise InputError(
            f"no compiler for {name}: {error}; `pip install 'ssd-jax[cuda-aot]'` has it"
        ) from None
    return list(found.devices)
