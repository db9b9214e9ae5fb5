"""Code World Model: llama with windows in three of four layers."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, biases
from ssd_jax.models.families.windows import windows


def _read(config: ConfigReader) -> dict[str, Any]:
    layers = range(config.count("num_hidden_layers"))
    return biases(config) | windows(config, default=[layer % 4 != 0 for layer in layers])


CWM = Family(name="cwm", read=_read, defaults={"sliding_window": 8192, "head_dim": 128})
