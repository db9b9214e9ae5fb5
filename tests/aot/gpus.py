"""Whether there is a compiler for GPUs."""

import importlib.util

import jax
import pytest


def require():
    """Skips a test where there is none."""
    missing = [
        name
        for name in ("jax_plugins.xla_cuda13", "nvidia.cu13")
        if importlib.util.find_spec(name.split(".")[0]) is None
        or not importlib.util.find_spec(name)
    ]
    if jax.__version_info__ < (0, 12):
        missing.append("JAX 0.12")
    if missing:
        pytest.skip(
            f"no compiler for CUDA ({', '.join(missing)} missing): "
            "pip install 'ssd-jax[cuda-aot]' with Python 3.12"
        )
