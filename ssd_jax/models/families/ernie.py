"""ERNIE 4.5: llama whose heads are rotated by neighbours; the larger ones have experts."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    NEIGHBOURS,
    SHARED_EXPERTS,
    Family,
    GgufArchitecture,
    TensorLayout,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.mechanisms import Experts

_DEFAULTS = {"rope_theta": 500000.0, "tie_word_embeddings": True}
_LEAST_SUM = 1e-12
"""What weights are divided by at least; their sums are larger."""
_CORRECTION = "mlp.router.e_score_correction_bias"


def _read(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("use_bias")
    return {"qkv_bias": bias, "output_bias": bias, "mlp_bias": bias}


def _read_moe(config: ConfigReader) -> dict[str, Any]:
    if config.flag("use_bias"):
        raise config.unsupported("use_bias", True, "experts have no biases")
    if config.positive("moe_norm_min", _LEAST_SUM) > _LEAST_SUM:
        raise config.unsupported("moe_norm_min", config.get("moe_norm_min"), f"it is {_LEAST_SUM}")
    layers, key = range(config.count("num_hidden_layers")), "moe_layer_start_index"
    first = 0 if config.get(key) == 0 else config.count(key, 1)
    key = "moe_layer_end_index"
    last = layers[-1] if config.get(key) in (None, -1) else config.count(key)
    every, size = config.count("moe_layer_interval", 1), config.count("moe_intermediate_size")
    key = "moe_num_shared_experts"
    shared = 0 if config.get(key) == 0 else config.count(key, 2)
    experts = Experts(
        count=config.count("moe_num_experts"),
        chosen=config.count("moe_k"),
        intermediate=size,
        correction=True,
        shared=shared * size,
        dense_layers=tuple(i for i in layers if not first <= i <= last or (i + 1) % every),
    )
    return {"experts": experts.of_layers(layers)}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    return {
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
        "mlp_bias": None,
    }


def _gguf_moe(keys: GgufKeys) -> dict[str, Any]:
    size = keys.count("expert_feed_forward_length")
    shared = keys.count_or_zero("expert_shared_count")
    keys.require("expert_shared_feed_forward_length", (None, shared * size))
    return (
        _gguf(keys)
        | keys.experts("moe_num_experts", "moe_k")
        | {
            "moe_intermediate_size": size,
            "moe_num_shared_experts": shared,
            "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
            "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
        }
    )


ERNIE = Family(
    name="ernie4_5",
    read=_read,
    defaults=_DEFAULTS | {"head_dim": 128},
    layout=NEIGHBOURS,
    gguf=GgufArchitecture(name="ernie4_5", read=_gguf, layout=NEIGHBOURS),
)
ERNIE_MOE = Family(
    name="ernie4_5_moe",
    read=_read_moe,
    defaults=_DEFAULTS,
    layout=TensorLayout(
        modules={
            "mlp.gate": ("mlp.router",),
            "mlp.moe_statics": ("mlp.router",),
            "mlp.gate.moe_statics": ("mlp.router",),
        }
        | SHARED_EXPERTS,
        rotates_neighbours=True,
        experts=EXPERTS_APART,
        axes={_CORRECTION: 1},
    ),
    gguf=GgufArchitecture(
        name="ernie4_5-moe",
        read=_gguf_moe,
        layout=TensorLayout(rotates_neighbours=True, axes={_CORRECTION: 1}),
    ),
)
