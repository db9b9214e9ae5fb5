"""Whether there is a compiler for GPUs."""

import importlib.util

import jax


def _missing() -> list[str]:
    found = importlib.util.find_spec
    names = [
        name
        for name in ("jax_plugins.xla_cuda13", "nvidia.cu13")
        if found(name.split(".")[0]) is None or not found(name)
    ]
    return names if jax.__version_info__ >= (0, 12) else [*names, "JAX 0.12"]


WHY: str | None = (
    f"no compiler for CUDA ({', '.join(_missing())} missing): "
    "pip install 'ssd-jax[cuda-aot]' with Python 3.12"
    if _missing()
    else None
)
"""Why there is none."""
