"""Qwen 2, 2.5 and QwQ; Qwen 3; those of 1.5, 2 and 3 with experts; the text part of Qwen-VL."""

import dataclasses
from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    TEXT_PREFIXES,
    ExpertArrays,
    Family,
    GgufArchitecture,
    TensorLayout,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Experts


def _qwen2(config: ConfigReader) -> dict[str, Any]:
    config.get("attention_bias")  # queries, keys and values have biases whatever it says
    return _windows(config) | {"qkv_bias": True}


def _qwen3(config: ConfigReader) -> dict[str, Any]:
    bias = config.flag("attention_bias")
    return _windows(config) | {"qkv_bias": bias, "output_bias": bias, "qk_norm": True}


def _qwen2_moe(config: ConfigReader) -> dict[str, Any]:
    layers, first = config.count("num_hidden_layers"), config.get("max_window_layers", 28)
    pattern = {}
    if config.flag("use_sliding_window"):
        pattern = windows(config, default=[i % 2 == 0 and i < first for i in range(layers)])
    shared = config.count("shared_expert_intermediate_size")
    experts = _experts(config, shared=shared, shared_gate=True)
    return pattern | {"qkv_bias": config.flag("qkv_bias", default=True), "experts": experts}


def _qwen3_moe(config: ConfigReader) -> dict[str, Any]:
    for key, usual in (("use_qk_norm", True), ("shared_expert_intermediate_size", 0)):
        if config.get(key, usual) != usual:
            raise config.unsupported(key, config.get(key))
    return _qwen3(config) | {"experts": _experts(config)}


def _qwen3_vl_moe(config: ConfigReader) -> dict[str, Any]:
    experts = _experts(config)
    if experts is not None:  # whatever the file says
        experts = dataclasses.replace(experts, normalized=True)
    return _qwen3(config) | {"experts": experts}


def _experts(config: ConfigReader, **shared: Any) -> Experts | None:
    layers = range(config.count("num_hidden_layers"))
    dense, every = config.get("mlp_only_layers") or (), config.count("decoder_sparse_step", 1)
    experts = Experts(
        count=config.count("num_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("moe_intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
        dense_layers=tuple(i for i in layers if i in dense or (i + 1) % every),
        **shared,
    )
    return experts.of_layers(layers)


def _windows(config: ConfigReader) -> dict[str, Any]:
    """Those of layers from `max_window_layers` on, where the file says so."""
    if not config.flag("use_sliding_window"):
        return {}
    first = config.count("max_window_layers", config.count("num_hidden_layers"))
    return windows(config, default=[i >= first for i in range(config.count("num_hidden_layers"))])


def _gguf_qwen2_moe(keys: GgufKeys) -> dict[str, Any]:
    experts, channels = keys.experts("num_experts"), keys.count("feed_forward_length")
    of_expert = channels // experts["num_experts_per_tok"]
    return experts | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length", of_expert),
        "shared_expert_intermediate_size": keys.count(
            "expert_shared_feed_forward_length", channels
        ),
        "qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
    }


def _gguf_qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    layers = range(keys.count("block_count"))
    return keys.experts("num_experts") | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [i for i in layers if keys.has_tensor(f"blk.{i}.ffn_up.weight")],
    }


def _gguf_vl(keys: GgufKeys) -> dict[str, Any]:
    """Sections of RoPE, and what is added to layers, are about images."""
    keys.by_layer("rope.dimension_sections")
    return {}


def _gguf_vl_moe(keys: GgufKeys) -> dict[str, Any]:
    return _gguf_vl(keys) | _gguf_qwen3_moe(keys)


QWEN2 = Family(name="qwen2", read=_qwen2, gguf=GgufArchitecture(name="qwen2"))
QWEN3 = Family(name="qwen3", read=_qwen3, gguf=GgufArchitecture(name="qwen3"))
_LAYOUT = TensorLayout(modules={"mlp.gate": ("mlp.router",)}, experts=EXPERTS_APART)
QWEN2_MOE = Family(
    name="qwen2_moe",
    read=_qwen2_moe,
    layout=_LAYOUT,
    gguf=GgufArchitecture(
        name="qwen2moe",
        read=_gguf_qwen2_moe,
        layout=TensorLayout(axes={"mlp.shared_expert_gate.weight": 2}),
    ),
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    read=_qwen3_moe,
    layout=_LAYOUT,
    gguf=GgufArchitecture(name="qwen3moe", read=_gguf_qwen3_moe),
)
_TEXT = TensorLayout(prefixes=TEXT_PREFIXES)
_SEEING: dict[str, Any] = {"read": _qwen2, "part": "text_config", "layout": _TEXT}
QWEN2_VL = Family(name="qwen2_vl", defaults={"rope_theta": 1e6}, **_SEEING)
QWEN2_5_VL = Family(
    name="qwen2_5_vl",
    defaults={"rope_theta": 1e6},
    gguf=GgufArchitecture(name="qwen2vl", read=_gguf_vl),
    **_SEEING,
)
QWEN3_VL = Family(
    name="qwen3_vl",
    read=_qwen3,
    part="text_config",
    layout=_TEXT,
    gguf=GgufArchitecture(name="qwen3vl", read=_gguf_vl),
)
QWEN3_VL_MOE = Family(
    name="qwen3_vl_moe",
    read=_qwen3_vl_moe,
    part="text_config",
    layout=TensorLayout(
        modules={"mlp.gate": ("mlp.router",)},
        prefixes=TEXT_PREFIXES,
        expert_arrays=ExpertArrays(
            modules={
                "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
                "mlp.experts.down_proj": ("mlp.experts.down_proj",),
            }
        ),
    ),
    gguf=GgufArchitecture(name="qwen3vlmoe", read=_gguf_vl_moe),
)
