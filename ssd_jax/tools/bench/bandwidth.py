"""How fast this machine's memory is: the ceiling of a forward that must read all weights."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from ssd_jax.system.environment import Device, cpu_affinity

SMALLEST_BUFFER = 256 << 20
LARGEST_BUFFER = 2 << 30
CALLS_IN_FLIGHT = 10
"""Device programs timed together, so that the launch of one does not count."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bandwidth:
    """Measured bandwidth, best of several runs, in 1e9 bytes per second.

    Attributes:
      copy_gb_per_s: of copying; bytes read and bytes written both count.
      read_gb_per_s: of reading everything and reducing it to one value; weights are only read.
      buffer_bytes: memory touched by one run.
      cache_bytes: the last-level cache of the CPUs used; None on other devices or if not known.
      threads: CPU threads used; None on other devices.
    """

    copy_gb_per_s: float
    read_gb_per_s: float
    buffer_bytes: int
    cache_bytes: int | None
    threads: int | None


def measure_bandwidth(
    device: Device, *, buffer_bytes: int | None = None, repeats: int = 5
) -> Bandwidth:
    """Measures the memory that a forward on `device` reads its weights from.

    Args:
      device: a CPU is measured with one thread on each CPU that this process may use.
      buffer_bytes: memory to touch; by default twice the last-level cache, within 256 MiB, 2 GiB
        and an eighth of the memory.
    """
    cache = threads = None
    if device.platform != "cpu":
        size = buffer_bytes or LARGEST_BUFFER
        copy, read = _device_seconds(device, size, repeats)
    else:
        cpus = cpu_affinity()
        threads = len(cpus) if cpus else os.cpu_count() or 1
        cache = cache_bytes(cpus) if cpus else None
        eighth = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8
        default_size = min(max(SMALLEST_BUFFER, 2 * (cache or 0)), LARGEST_BUFFER, eighth)
        size = buffer_bytes or default_size
        copy, read = _host_seconds(threads, size, repeats)
    return Bandwidth(
        copy_gb_per_s=size / copy / 1e9,
        read_gb_per_s=size / read / 1e9,
        buffer_bytes=size,
        cache_bytes=cache,
        threads=threads,
    )


def cache_bytes(cpus: Sequence[int], root: Path = Path("/sys/devices/system/cpu")) -> int | None:
    """Size of the last-level caches of these CPUs, shared ones once; None if not known."""
    sizes: dict[str, int] = {}
    for cpu in cpus:
        try:
            folders = (root / f"cpu{cpu}" / "cache").glob("index*")
            last_level = max(folders, key=lambda folder: int((folder / "level").read_text()))
            sharing_cpus = (last_level / "shared_cpu_list").read_text()
            sizes[sharing_cpus] = (
                int((last_level / "size").read_text().strip().removesuffix("K")) << 10
            )
        except (OSError, ValueError):
            return None
    return sum(sizes.values()) or None


def _host_seconds(threads: int, size: int, repeats: int) -> tuple[float, float]:
    """Seconds to copy (half of the buffer to the other half) and to read `size` bytes."""
    buffer = np.empty(size // 8, np.int64)
    half = len(buffer) // 2
    sides = buffer, buffer[:half], buffer[half : 2 * half]
    blocks, sources, targets = (np.array_split(side, threads) for side in sides)
    with ThreadPoolExecutor(threads) as pool:  # NumPy releases the GIL in all of these

        def copy() -> None:
            list(pool.map(np.copyto, targets, sources))

        def read() -> None:
            # The cheapest of NumPy's reductions: its float32 sum is slower than memory.
            list(pool.map(np.bitwise_or.reduce, blocks))

        list(pool.map(lambda block: block.fill(1), blocks))  # first touch
        return _best(copy, repeats), _best(read, repeats)


def _device_seconds(device: Device, size: int, repeats: int) -> tuple[float, float]:
    """As `_host_seconds`, for a device; its copy adds one to each value of half the buffer."""
    import jax
    import jax.numpy as jnp

    rows = jnp.ones((max(size // 4096, 2), 1024), jnp.float32, device=device)
    half = jnp.array(rows[: rows.shape[0] // 2])
    increase, reduce = jax.jit(lambda x: x + 1), jax.jit(jnp.max)

    def copy() -> None:
        value = half
        for _ in range(CALLS_IN_FLIGHT):
            value = increase(value)
        value.block_until_ready()

    def read() -> None:
        jax.block_until_ready([reduce(rows) for _ in range(CALLS_IN_FLIGHT)])

    return _best(copy, repeats) / CALLS_IN_FLIGHT, _best(read, repeats) / CALLS_IN_FLIGHT


def _best(run: Callable[[], None], repeats: int) -> float:
    run()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return min(times)
