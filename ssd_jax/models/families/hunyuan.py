"""Hunyuan: norms of queries and keys behind RoPE; A13B has experts, one of them for all tokens.

Hunyuan 3 has norms before RoPE, and experts as DeepSeek-V3.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    Family,
    GgufArchitecture,
    TensorLayout,
    biases,
    sigmoid_experts,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.mechanisms import Experts

_NORMS = {
    "self_attn.query_layernorm": ("self_attn.q_norm",),
    "self_attn.key_layernorm": ("self_attn.k_norm",),
}
_SHARED = {
    f"mlp.shared_mlp.{part}_proj": (f"mlp.shared_expert.{part}_proj",)
    for part in ("gate", "up", "down")
}


def _dense(config: ConfigReader) -> dict[str, Any]:
    if config.get("use_cla"):
        raise config.unsupported("use_cla", True, "layers have keys and values of their own")
    bias = config.flag("attention_bias")
    norms = {"qk_norm": config.flag("use_qk_norm", default=True), "late_qk_norm": True}
    return {"qkv_bias": bias, "output_bias": bias} | norms


def _moe(config: ConfigReader) -> dict[str, Any]:
    size = config.count("intermediate_size")
    for key, usual in (("moe_intermediate_size", size), ("num_shared_expert", 1)):
        if _alike(config, key, usual) != usual:
            raise config.unsupported(key, config.get(key), f"it is {usual} in every layer")
    experts = Experts(
        count=config.count("num_experts"),
        chosen=_alike(config, "moe_topk", 1),
        intermediate=size,
        shared=size,
    )
    return _dense(config) | {"experts": experts}


def _v3(config: ConfigReader) -> dict[str, Any]:
    return biases(config) | sigmoid_experts(config) | {"qk_norm": True}


def _alike(config: ConfigReader, key: str, default: int) -> int:
    """A positive integer, which may be written for every layer.

    Raises:
      InputError: layers have different ones.
    """
    value = config.get(key)
    if isinstance(value, list) and len({*value}) == 1:
        return ConfigReader({key: value[0]}, config.source).count(key)
    return config.count(key, default)


def _gguf_moe(keys: GgufKeys) -> dict[str, Any]:
    size = keys.count("expert_feed_forward_length")
    keys.require("expert_shared_count", (None, 1))
    keys.require("expert_shared_feed_forward_length", (None, size))
    return keys.experts("num_experts", "moe_topk") | {"intermediate_size": size}


def _gguf_v3(keys: GgufKeys) -> dict[str, Any]:
    layers, experts = keys.layers, keys.sigmoid_experts()
    size = experts["moe_intermediate_size"]
    shared = keys.count("expert_shared_feed_forward_length", size)
    if shared % size:
        raise keys.error(
            "expert_shared_feed_forward_length", f" = {shared} is no multiple of {size} channels"
        )
    dense = [keys.has_tensor(f"blk.{layer}.ffn_up.weight") for layer in range(layers)]
    return experts | {
        "num_hidden_layers": layers,
        "n_shared_experts": shared // size,
        "mlp_layer_types": ["dense" if is_dense else "sparse" for is_dense in dense],
    }


HUNYUAN = Family(
    name="hunyuan_v1_dense",
    read=_dense,
    layout=TensorLayout(modules=_NORMS),
    gguf=GgufArchitecture(name="hunyuan-dense"),
)
HUNYUAN_MOE = Family(
    name="hunyuan_v1_moe",
    read=_moe,
    layout=TensorLayout(
        modules=_NORMS | _SHARED | {"mlp.gate.wg": ("mlp.router",)}, experts=EXPERTS_APART
    ),
    gguf=GgufArchitecture(name="hunyuan-moe", read=_gguf_moe),
)
HUNYUAN_V3 = Family(
    name="hy_v3",
    read=_v3,
    defaults={"rope_theta": 11158840.0, "first_k_dense_replace": 1, "norm_topk_prob": True},
    renamed={
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "router_scaling_factor": "routed_scaling_factor",
    },
    layout=TensorLayout(
        modules=_SHARED | {"mlp.router.gate": ("mlp.router",), "mlp": ("mlp.router",)},
        experts=EXPERTS_APART,
        left_out="eh_proj",
    ),
    gguf=GgufArchitecture(name="hy_v3", read=_gguf_v3),
)
