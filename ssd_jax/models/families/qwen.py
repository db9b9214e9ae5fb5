"""Qwen 2, 2.5 and QwQ; the dense models of Qwen 3."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family
from ssd_jax.models.families.windows import windows


def _qwen2(config: ConfigReader) -> dict[str, Any]:
    config.get("attention_bias")  # queries, keys and values have biases whatever it says
    return _windows(config) | {"qkv_bias": True}


def _qwen3(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return _windows(config) | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _windows(config: ConfigReader) -> dict[str, Any]:
    """Those of layers from `max_window_layers` on, where the file says so."""
    if not config.flag("use_sliding_window"):
        return {}
    first = config.count("max_window_layers", config.count("num_hidden_layers"))
    return windows(config, default=[i >= first for i in range(config.count("num_hidden_layers"))])


QWEN2 = Family(name="qwen2", read=_qwen2)
QWEN3 = Family(name="qwen3", read=_qwen3)
