"""StableLM 1.6B, 3B and 12B: layer norms, a quarter of a head is rotated.

The largest has norms of heads, and attention and feed-forward side by side.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, TensorLayout, partial_rotary


def _read(config: ConfigReader) -> dict[str, Any]:
    norms = config.flag("qk_layernorm")
    return partial_rotary(config, 0.25) | {
        "qkv_bias": config.flag("use_qkv_bias"),
        "qk_norm": norms,
        "head_qk_norm": norms,
        "layer_norm": True,
        "parallel": config.flag("use_parallel_residual"),
    }


STABLELM = Family(
    name="stablelm",
    read=_read,
    renamed={"layer_norm_eps": "rms_norm_eps", "rope_pct": "partial_rotary_factor"},
    layout=TensorLayout(
        experts={f"self_attn.{part}_layernorm.norms.*": f"self_attn.{part}_norm" for part in "qk"}
    ),
)
