"""What XLA is told before JAX starts."""

from __future__ import annotations

import jaxlib.version

DEVICES = "--xla_force_host_platform_device_count=8"
EMITTERS = jaxlib.version.__version_info__ < (0, 11)
"""Whether fusions have emitters that can be done without; they take half of a small compile."""
QUICK = "--xla_cpu_parallel_codegen_split_count=1" + (
    " --xla_cpu_use_fusion_emitters=false" if EMITTERS else ""
)
