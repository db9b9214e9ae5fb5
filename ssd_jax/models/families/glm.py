"""GLM 4: half of a head is rotated, by neighbours in the dense ones; GLM 4.5 has experts.

Dense ones of 2025 have norms on both sides.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    GATE_UP_JOINED,
    GGUF_BOTH_NORMS,
    GGUF_NORM_BEFORE,
    QKV_JOINED,
    SHARED_EXPERTS,
    Family,
    GgufArchitecture,
    TensorLayout,
    partial_rotary,
    sigmoid_experts,
)
from ssd_jax.models.families.gguf_keys import GgufKeys


def _glm(config: ConfigReader) -> dict[str, Any]:
    return partial_rotary(config, 0.5) | {"qkv_bias": config.flag("attention_bias")}


def _glm4(config: ConfigReader) -> dict[str, Any]:
    return _glm(config) | {"norm_placement": "both"}


def _glm4_moe(config: ConfigReader) -> dict[str, Any]:
    return _glm(config) | sigmoid_experts(config) | {"qk_norm": config.flag("use_qk_norm")}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    biases = (keys.has_tensor(f"blk.0.attn_{part}.bias") for part in ("q", "qkv"))
    return {"attention_bias": any(biases)}


def _gguf_moe(keys: GgufKeys) -> dict[str, Any]:
    return keys.sigmoid_experts() | {
        "num_hidden_layers": keys.layers,
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


_NORMS = {
    "post_self_attn_layernorm": ("attention_output_norm",),
    "post_mlp_layernorm": ("mlp_output_norm",),
}
_LAYOUT = TensorLayout(modules=GATE_UP_JOINED, rotates_neighbours=True)
GLM = Family(
    name="glm",
    read=_glm,
    layout=_LAYOUT,
    gguf=GgufArchitecture(
        name="chatglm",
        read=_gguf,
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        layout=TensorLayout(modules=QKV_JOINED | GATE_UP_JOINED, rotates_neighbours=True),
        partial_rotary=True,
    ),
)
GLM4 = Family(
    name="glm4",
    read=_glm4,
    layout=TensorLayout(modules=GATE_UP_JOINED | _NORMS, rotates_neighbours=True),
    gguf=GgufArchitecture(
        name="glm4",
        modules={"ffn_up": "mlp.gate_up_proj", **GGUF_BOTH_NORMS},
        layout=_LAYOUT,
        partial_rotary=True,
    ),
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
    gguf=GgufArchitecture(
        name="glm4moe", read=_gguf_moe, modules=GGUF_NORM_BEFORE, partial_rotary=True
    ),
)
