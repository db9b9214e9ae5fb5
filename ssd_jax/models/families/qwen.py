"""Qwen 2, 2.5 and QwQ; the dense models of Qwen 3."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family


def _qwen2(config: ConfigReader) -> dict[str, Any]:
    config.get("attention_bias")  # queries, keys and values have biases whatever it says
    return {"qkv_bias": True}


def _qwen3(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


QWEN2 = Family(name="qwen2", read=_qwen2)
QWEN3 = Family(name="qwen3", read=_qwen3)
