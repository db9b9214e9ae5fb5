"""StableLM 1.6B, 3B and 12B: layer norms, a quarter of a head is rotated.

The largest has norms of heads, and attention and feed-forward side by side.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, GgufArchitecture, TensorLayout, partial_rotary
from ssd_jax.models.families.gguf_keys import GgufKeys


def _read(config: ConfigReader) -> dict[str, Any]:
    norms = config.flag("qk_layernorm")
    return partial_rotary(config, 0.25) | {
        "qkv_bias": config.flag("use_qkv_bias"),
        "qk_norm": norms,
        "head_qk_norm": norms,
        "layer_norm": True,
        "parallel": config.flag("use_parallel_residual"),
    }


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    keys.get("use_parallel_residual")  # whatever it says
    return {
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


STABLELM = Family(
    name="stablelm",
    read=_read,
    renamed={"layer_norm_eps": "rms_norm_eps", "rope_pct": "partial_rotary_factor"},
    layout=TensorLayout(
        experts={f"self_attn.{part}_layernorm.norms.*": f"self_attn.{part}_norm" for part in "qk"}
    ),
    gguf=GgufArchitecture(name="stablelm", read=_gguf, partial_rotary=True, layer_norm=True),
)
