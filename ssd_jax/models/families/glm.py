"""GLM 4: RoPE of neighbours in half a head; those of 2025 have norms on both sides."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import GATE_UP_JOINED, Family, TensorLayout, partial_rotary


def _glm(config: ConfigReader) -> dict[str, Any]:
    return partial_rotary(config, 0.5) | {"qkv_bias": config.flag("attention_bias")}


def _glm4(config: ConfigReader) -> dict[str, Any]:
    return _glm(config) | {"norm_placement": "both"}


_NORMS = {
    "post_self_attn_layernorm": ("attention_output_norm",),
    "post_mlp_layernorm": ("mlp_output_norm",),
}
GLM = Family(
    name="glm", read=_glm, layout=TensorLayout(modules=GATE_UP_JOINED, rotates_neighbours=True)
)
GLM4 = Family(
    name="glm4",
    read=_glm4,
    layout=TensorLayout(modules=GATE_UP_JOINED | _NORMS, rotates_neighbours=True),
)
