"""Phi 3, 3.5 and 4: joined matrices, partial RoPE, longrope."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    GATE_UP_JOINED,
    QKV_JOINED,
    Family,
    TensorLayout,
    partial_rotary,
)
from ssd_jax.models.families.windows import windows


def _read(config: ConfigReader) -> dict[str, Any]:
    return partial_rotary(config) | windows(config)


PHI3 = Family(name="phi3", read=_read, layout=TensorLayout(modules=QKV_JOINED | GATE_UP_JOINED))
