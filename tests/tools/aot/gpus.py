"""Whether there is a compiler for GPUs."""

import importlib.util

import jax

_NEEDED = ("jax_plugins.xla_cuda13", "nvidia.cu13")


def _is_there(name: str) -> bool:
    package = name.split(".")[0]
    return importlib.util.find_spec(package) is not None and bool(importlib.util.find_spec(name))


_MISSING = [name for name in _NEEDED if not _is_there(name)]
if jax.__version_info__ < (0, 12):
    _MISSING.append("JAX 0.12")

WHY = _MISSING and (
    f"no compiler for CUDA ({', '.join(_MISSING)} missing): "
    "pip install 'ssd-jax[cuda-aot]' with Python 3.12"
)
"""Why there is none; empty where there is one."""
