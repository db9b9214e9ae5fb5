"""Nemotron 4, Nemotron Mini, Minitron: layer norms of weight 1 + w, squared ReLU, half RoPE."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    Family,
    GgufArchitecture,
    TensorLayout,
    biases,
    partial_rotary,
)


def _read(config: ConfigReader) -> dict[str, Any]:
    activation = config.get("hidden_act")
    if activation != "relu2":
        raise config.unsupported("hidden_act", activation)
    feed_forward = {"activation": "relu2", "gated": False, "layer_norm": True}
    return biases(config) | partial_rotary(config, 0.5) | feed_forward


NEMOTRON = Family(
    name="nemotron",
    read=_read,
    defaults={"hidden_act": "relu2"},
    renamed={"norm_eps": "rms_norm_eps", "rope_percent": "partial_rotary_factor"},
    layout=TensorLayout(norm_offset=1.0),
    gguf=GgufArchitecture(name="nemotron", partial_rotary=True, layer_norm=True),
)
