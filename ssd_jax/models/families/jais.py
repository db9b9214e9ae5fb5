"""Jais 2: layer norms, biases, squared ReLU."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, GgufArchitecture, biases


def _read(config: ConfigReader) -> dict[str, Any]:
    activation = config.get("hidden_act")
    if activation != "relu2":
        raise config.unsupported("hidden_act", activation)
    return biases(config) | {"activation": "relu2", "gated": False, "layer_norm": True}


JAIS2 = Family(
    name="jais2",
    read=_read,
    defaults={"hidden_act": "relu2", "attention_bias": True, "mlp_bias": True},
    renamed={"layer_norm_eps": "rms_norm_eps"},
    gguf=GgufArchitecture(name="jais2", layer_norm=True),
)
