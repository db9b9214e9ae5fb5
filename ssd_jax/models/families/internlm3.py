"""InternLM 3: llama with a size of heads of its own."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family


def _read(config: ConfigReader) -> dict[str, Any]:
    others = config.flag("mlp_bias")
    return {"qkv_bias": config.flag("attention_bias"), "output_bias": others, "mlp_bias": others}


INTERNLM3 = Family(
    name="internlm3",
    read=_read,
    defaults={"head_dim": 128},
    renamed={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
)
