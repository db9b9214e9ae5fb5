"""dots.llm1: Qwen3's attention, DeepSeek-V3's experts."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    SHARED_EXPERTS,
    Family,
    GgufArchitecture,
    TensorLayout,
    sigmoid_experts,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.windows import windows


def _read(config: ConfigReader) -> dict[str, Any]:
    bias, layers = config.flag("attention_bias"), config.count("num_hidden_layers")
    first = config.get("max_window_layers", layers)
    pattern = windows(config, default=[i >= first for i in range(layers)])
    attention = {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}
    return pattern | attention | sigmoid_experts(config)


DOTS1 = Family(
    name="dots1",
    read=_read,
    layout=TensorLayout(
        modules={"mlp.gate": ("mlp.router",)} | SHARED_EXPERTS, experts=EXPERTS_APART
    ),
    gguf=GgufArchitecture(name="dots1", read=GgufKeys.sigmoid_experts),
)
