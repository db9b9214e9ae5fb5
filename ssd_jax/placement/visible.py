"""Which devices JAX starts with: the draft's own in its process, the others in the target's.

When JAX starts, it takes most of the memory of every GPU that the process sees.
"""

from __future__ import annotations

import ctypes
import importlib.util
import pkgutil
from typing import Any, Literal, NamedTuple

from ssd_jax.compat import jax_has_started
from ssd_jax.errors import InputError

_VISIBLE_DEVICES = "jax_cuda_visible_devices"
MOST_OF_A_PROCESSOR = 256
"""Most virtual devices that a processor is divided into."""


class Devices(NamedTuple):
    """Devices of a process: GPUs as CUDA counts them, virtual devices of the processor, or TPUs."""

    platform: Literal["cpu", "gpu", "tpu"]
    numbers: tuple[int, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Name of each device, such as gpu:1."""
        return tuple(f"{self.platform}:{number}" for number in self.numbers)

    @property
    def is_default(self) -> bool:
        """Whether a program that names no device runs on these devices and no others."""
        return len(self.numbers) == 1 and (self.platform == "gpu" or self.numbers == (0,))

    def claimable(self) -> bool:
        """Whether JAX may still start with these devices, or has started with them."""
        if self.platform != "gpu":
            return True
        if not jax_has_started():
            return _visible_setting() in ("all", self._number_list)
        return _visible_setting() == self._number_list and self._has_started_here()

    def claim(self) -> None:
        """Configures JAX to start with these devices; of GPUs, with no others.

        Raises:
          InputError: JAX has already started with other devices.
        """
        import jax

        if not self.claimable():
            raise InputError(
                f"JAX has started in this process with other devices than {self}, and those of the "
                "draft are for its own process alone; open the model before anything else uses "
                f"JAX, or first of all set jax.config.update({_VISIBLE_DEVICES!r}, "
                f"{self._number_list!r}), or use draft_devices = 'cpu', or draft_placement = "
                "'submesh'"
            )
        if jax_has_started():
            return
        if self.platform == "gpu":
            jax.config.update(_VISIBLE_DEVICES, self._number_list)
        elif self.platform == "cpu":
            jax.config.update("jax_platforms", "cpu")  # else an accelerator would come first
            if not self.is_default:
                jax.config.update("jax_num_cpu_devices", self.numbers[-1] + 1)

    def start(self) -> list[Any]:
        """Starts JAX, and returns the devices that were claimed.

        Raises:
          InputError: JAX has other devices.
        """
        import jax

        devices = jax.devices()
        if not self._has_started_here():
            names = ",".join(device_names())
            raise InputError(f"JAX has {names} in place of {self}; does its plugin work there?")
        if self.platform == "gpu":
            return devices
        return [devices[number] for number in self.numbers]

    @property
    def _number_list(self) -> str:
        return ",".join(map(str, self.numbers))

    def _has_started_here(self) -> bool:
        import jax

        count = len(jax.devices())
        enough = count == len(self.numbers) if self.platform == "gpu" else count > self.numbers[-1]
        return jax.default_backend() == self.platform and enough

    def __str__(self) -> str:
        return f"{self.platform}:{self._number_list}"


PROCESSOR = Devices("cpu", (0,))


def device_names() -> tuple[str, ...]:
    """Names of all devices of this process, with the system's numbers."""
    import jax

    return tuple(f"{device.platform}:{device.local_hardware_id}" for device in jax.devices())


def count_gpus() -> int:
    """Number of NVIDIA GPUs that JAX takes or would take; does not start JAX."""
    import jax

    platforms = jax.config.jax_platforms  # pyright: ignore[reportAttributeAccessIssue]
    first, _, _ = (platforms or "cuda").partition(",")
    if first not in ("cuda", "gpu") or not _has_plugin():
        return 0
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    count = ctypes.c_int()
    is_ready = driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0
    return count.value if is_ready else 0


def _has_plugin() -> bool:
    """Whether JAX has a plugin for CUDA."""
    spec = importlib.util.find_spec("jax_plugins")
    locations = () if spec is None else spec.submodule_search_locations or ()
    return any(module.name.startswith("xla_cuda") for module in pkgutil.iter_modules(locations))


def _visible_setting() -> str:
    import jax

    return jax.config.read(_VISIBLE_DEVICES)
