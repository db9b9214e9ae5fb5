"""Seed-OSS: llama with biases of queries, keys and values."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import GGUF_NORM_BEFORE, Family, GgufArchitecture
from ssd_jax.models.families.gguf_keys import GgufKeys


def _read(config: ConfigReader) -> dict[str, Any]:
    return {
        "qkv_bias": config.flag("attention_bias", default=True),
        "output_bias": config.flag("attention_out_bias"),
        "mlp_bias": config.flag("mlp_bias"),
    }


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


SEED_OSS = Family(
    name="seed_oss",
    read=_read,
    gguf=GgufArchitecture(name="seed_oss", read=_gguf, modules=GGUF_NORM_BEFORE),
)
