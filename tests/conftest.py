"""Shared fixtures. Virtual CPU devices stand for accelerators; they are asked for before JAX starts."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
