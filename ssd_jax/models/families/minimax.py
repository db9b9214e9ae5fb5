"""MiniMax-M2: experts by sigmoids with a correction, norms of all heads, half RoPE."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    MIXTRAL_EXPERTS,
    Family,
    GgufArchitecture,
    TensorLayout,
    partial_rotary,
)
from ssd_jax.models.families.gguf_keys import SIGMOID, GgufKeys
from ssd_jax.models.mechanisms import Experts

_ONLY = {
    "scoring_func": ("sigmoid", None),
    "use_routing_bias": (True, None),
    "use_qk_norm": (True, None),
    "qk_norm_type": ("per_layer", None),
    "shared_intermediate_size": (0, None),
}
"""Keys with values that these models have; other ones would be other models."""


def _read(config: ConfigReader) -> dict[str, Any]:
    for key, values in _ONLY.items():
        if config.get(key) not in values:
            raise config.unsupported(key, config.get(key))
    linear = {*(config.get("attn_type_list") or ())} - {1}
    if linear:
        raise config.unsupported("attn_type_list", sorted(linear)[0], "1 is full attention")
    head_dim = config.count("head_dim")
    rotary = partial_rotary(config, config.count("rotary_dim", head_dim) / head_dim)
    experts = Experts(
        count=config.count("num_local_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
        scoring="sigmoid",
        correction=True,
    )
    return rotary | {"qk_norm": True, "joint_qk_norm": True, "experts": experts}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    keys.require("expert_gating_func", (SIGMOID,))
    size = keys.count("expert_feed_forward_length")
    return keys.experts("num_local_experts") | {"intermediate_size": size}


MINIMAX_M2 = Family(
    name="minimax_m2",
    read=_read,
    defaults={"rope_theta": 5e6},
    layout=TensorLayout(
        modules={"block_sparse_moe.gate": ("mlp.router",), "block_sparse_moe": ("mlp.router",)},
        experts=MIXTRAL_EXPERTS,
    ),
    gguf=GgufArchitecture(name="minimax-m2", read=_gguf, partial_rotary=True),
)
