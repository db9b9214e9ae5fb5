"""Granite 3: llama with four multipliers."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, biases
from ssd_jax.models.mechanisms import Multipliers


def _read(config: ConfigReader) -> dict[str, Any]:
    multipliers = Multipliers(
        embedding=float(config.positive("embedding_multiplier", 1.0)),
        residual=float(config.positive("residual_multiplier", 1.0)),
        scores=float(config.positive("attention_multiplier", 1.0)),
        logits=1 / config.positive("logits_scaling", 1.0),
    )
    return biases(config) | {"multipliers": multipliers}


GRANITE = Family(name="granite", read=_read)
