"""Seed-OSS: llama with biases of queries, keys and values."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    return {
        "qkv_bias": config.flag("attention_bias", default=True),
        "output_bias": config.flag("attention_out_bias"),
        "mlp_bias": config.flag("mlp_bias"),
    }


SEED_OSS = Family(name="seed_oss", read=_read)
