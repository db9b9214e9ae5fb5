"""GLM 4: half of a head is rotated, by neighbours in the dense ones; GLM 4.5 has experts.

Dense ones of 2025 have norms on both sides.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    GATE_UP_JOINED,
    SHARED_EXPERTS,
    Family,
    TensorLayout,
    partial_rotary,
    sigmoid_experts,
)


def _glm(config: ConfigReader) -> dict[str, Any]:
    return partial_rotary(config, 0.5) | {"qkv_bias": config.flag("attention_bias")}


def _glm4(config: ConfigReader) -> dict[str, Any]:
    return _glm(config) | {"norm_placement": "both"}


def _glm4_moe(config: ConfigReader) -> dict[str, Any]:
    return _glm(config) | sigmoid_experts(config) | {"qk_norm": config.flag("use_qk_norm")}


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
GLM4_MOE = Family(
    name="glm4_moe",
    read=_glm4_moe,
    defaults={"norm_topk_prob": True},
    layout=TensorLayout(
        modules={"mlp.gate": ("mlp.router",)} | SHARED_EXPERTS,
        experts=EXPERTS_APART,
        left_out="eh_proj",
    ),
)
