"""What XLA is told: before JAX starts, and of programs that users get."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jaxlib.version

DEVICES = "--xla_force_host_platform_device_count=8"
_EMITTERS = jaxlib.version.__version_info__ < (0, 11)
"""Whether fusions have emitters that can be done without; they take half of a small compile."""
QUICK = "--xla_cpu_parallel_codegen_split_count=1" + (
    " --xla_cpu_use_fusion_emitters=false" if _EMITTERS else ""
)


def use_emitters(wanted: bool) -> None:
    """Compiles from now on with those emitters, or as `QUICK` says."""
    if _EMITTERS:
        from jax._src import compiler  # those versions have no public way

        usual = _usual_options()
        compiler.get_compile_options = _with_emitters if wanted else usual


@functools.cache
def _usual_options() -> Callable[..., Any]:
    from jax._src import compiler

    return compiler.get_compile_options


def _with_emitters(*arguments, **more):
    options = _usual_options()(*arguments, **more)
    options.env_option_overrides = [("xla_cpu_use_fusion_emitters", True)]
    return options
