"""The architectures of GGUF files: how llama.cpp's converter writes what config.json says.

Where a file does not say what the model computes, llama.cpp knows it by the architecture, and so
does this module. Source: `convert_hf_to_gguf.py` and `src/models` of llama.cpp.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from ssd_jax.checkpoints.gguf.keys import GgufKeys, shortest
from ssd_jax.checkpoints.gguf.rope import FREQUENCIES, LONG, SHORT, rope_scaling
from ssd_jax.models.families.family import GATE_UP_JOINED, LOCAL_THETA, QKV_JOINED, TensorLayout

_BOTH_NORMS = {
    "post_attention_norm": "attention_output_norm",
    "post_ffw_norm": "mlp_output_norm",
}
_NORM_BEFORE = {"post_attention_norm": "post_attention_layernorm"}
_NEIGHBOURS = TensorLayout(rotates_neighbours=True)
_EPSILON = "attention.layer_norm_epsilon"
"""Key of the epsilon of norms that subtract the mean."""
_ROPE_BASE = 10000.0
_STARCODER2_WINDOW = 4096
_SIGMOID = 2
"""llama.cpp's number of experts' weights that are sigmoids."""


def _nothing(_: GgufKeys) -> dict[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgufFamily:
    """An architecture.

    Attributes:
      model_type: the family that it belongs to.
      read: from the header, keys of a config.json that only this architecture has; they may take
        the place of others, `model_type` too.
      modules: llama.cpp's names of modules in a layer that are Hugging Face's, or this package's,
        only here.
      layout: matrices that hold several, and whether the rotated dimensions of q and k heads are
        stored as neighbours, as llama.cpp's RoPE rotates them there. Norms have no offset.
      divisors: the tensors with numbers by which frequencies of RoPE are divided.
      partial_rotary: whether `rope.dimension_count` may be less than a head has.
      epsilon: the key of the epsilon of norms.
      activations: whether the header has parameters of every layer's activation.
    """

    model_type: str
    read: Callable[[GgufKeys], Mapping[str, Any]] = _nothing
    modules: Mapping[str, str] = dataclasses.field(default_factory=dict)
    layout: TensorLayout = dataclasses.field(default_factory=TensorLayout)
    divisors: tuple[str, ...] = ()
    partial_rotary: bool = False
    epsilon: str = "attention.layer_norm_rms_epsilon"
    activations: bool = False


def _granite(keys: GgufKeys) -> dict[str, Any]:
    keys.require("rope.scaling.finetuned", (None, True))  # false is a decoder without RoPE
    settings = {
        name: keys.number(key)
        for key, name in (
            ("attention.scale", "attention_multiplier"),
            ("embedding_scale", "embedding_multiplier"),
            ("residual_scale", "residual_multiplier"),
        )
        if keys.get(key)
    }
    return {
        "attention_multiplier": _head_dim(keys) ** -0.5,
        "logits_scaling": keys.number("logit_scale"),
        **settings,
    }


def _experts(keys: GgufKeys, name: str) -> dict[str, Any]:
    """How many experts there are, by the name of their number in config.json, and how many of a
    token."""
    return {
        name: keys.count("expert_count"),
        "num_experts_per_tok": keys.count("expert_used_count"),
    }


def _llama(keys: GgufKeys) -> dict[str, Any]:
    if not keys.get("expert_count"):
        return {}
    return {"model_type": "mixtral", **_experts(keys, "num_local_experts")}


def _granite_moe(keys: GgufKeys) -> dict[str, Any]:
    return _granite(keys) | _experts(keys, "num_local_experts")


def _olmoe(keys: GgufKeys) -> dict[str, Any]:
    return _experts(keys, "num_experts") | {"norm_topk_prob": False}


def _qwen3_moe(keys: GgufKeys) -> dict[str, Any]:
    layers = range(keys.count("block_count"))
    return _experts(keys, "num_experts") | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "norm_topk_prob": True,
        "mlp_only_layers": [i for i in layers if keys.has_tensor(f"blk.{i}.ffn_up.weight")],
    }


def _qwen2_moe(keys: GgufKeys) -> dict[str, Any]:
    experts, channels = _experts(keys, "num_experts"), keys.count("feed_forward_length")
    of_expert = channels // experts["num_experts_per_tok"]
    return experts | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length", of_expert),
        "shared_expert_intermediate_size": keys.count(
            "expert_shared_feed_forward_length", channels
        ),
        "norm_topk_prob": False,
        "qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
    }


def _seeing(keys: GgufKeys) -> dict[str, Any]:
    """A model that sees images: sections of RoPE, and what is added to layers, are about these."""
    keys.by_layer("rope.dimension_sections")
    return {}


def _qwen3_vl_moe(keys: GgufKeys) -> dict[str, Any]:
    return _seeing(keys) | _qwen3_moe(keys)


def _sigmoid_experts(keys: GgufKeys) -> dict[str, Any]:
    keys.require("expert_gating_func", (None, _SIGMOID))
    shared, dense = (
        keys.count(key) if keys.get(key) else 0
        for key in ("expert_shared_count", "leading_dense_block_count")
    )
    return _experts(keys, "n_routed_experts") | {
        "moe_intermediate_size": keys.count("expert_feed_forward_length"),
        "n_shared_experts": shared,
        "first_k_dense_replace": dense,
        "norm_topk_prob": bool(keys.get("expert_weights_norm", False)),
        "routed_scaling_factor": keys.number("expert_weights_scale", 1.0),
    }


def _chatglm(keys: GgufKeys) -> dict[str, Any]:
    biases = (keys.has_tensor(f"blk.0.attn_{part}.bias") for part in ("q", "qkv"))
    return {"attention_bias": any(biases)}


def _layers(keys: GgufKeys) -> int:
    """Number of layers without those that predict tokens further on."""
    key = "nextn_predict_layers"
    return keys.count("block_count") - (keys.count(key) if keys.get(key) else 0)


def _glm4_moe(keys: GgufKeys) -> dict[str, Any]:
    return _sigmoid_experts(keys) | {
        "num_hidden_layers": _layers(keys),
        "use_qk_norm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _ernie(keys: GgufKeys) -> dict[str, Any]:
    return {
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
        "mlp_bias": None,
    }


def _ernie_moe(keys: GgufKeys) -> dict[str, Any]:
    size = keys.count("expert_feed_forward_length")
    shared = keys.count("expert_shared_count") if keys.get("expert_shared_count") else 0
    keys.require("expert_shared_feed_forward_length", (None, shared * size))
    return _ernie(keys) | {
        "moe_num_experts": keys.count("expert_count"),
        "moe_k": keys.count("expert_used_count"),
        "moe_intermediate_size": size,
        "moe_num_shared_experts": shared,
        "moe_layer_start_index": keys.get("leading_dense_block_count", 0),
        "moe_layer_interval": keys.count("interleave_moe_layer_step", 1),
    }


def _command_r(keys: GgufKeys) -> dict[str, Any]:
    norms = keys.has_tensor("blk.0.attn_q_norm.weight")
    return {"logit_scale": keys.number("logit_scale"), "use_qk_norm": norms}


def _cohere2(keys: GgufKeys) -> dict[str, Any]:
    window = keys.count("attention.sliding_window")
    return {"logit_scale": keys.number("logit_scale"), **_windows(keys, window, period=4)}


def _minimax_m2(keys: GgufKeys) -> dict[str, Any]:
    keys.require("expert_gating_func", (_SIGMOID,))
    return _experts(keys, "num_local_experts") | {
        "intermediate_size": keys.count("expert_feed_forward_length"),
    }


def _gpt_oss(keys: GgufKeys) -> dict[str, Any]:
    scaling = rope_scaling(keys, keys.number("rope.freq_base", _ROPE_BASE))
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # files do not say it
    return _experts(keys, "num_local_experts") | {
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "rope_scaling": scaling,
        **_windows(keys, keys.get("attention.sliding_window"), period=2),
    }


def _gemma2(keys: GgufKeys) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **{cap: keys.number(cap) for cap in caps if keys.get(cap) is not None},
        "query_pre_attn_scalar": _query_scalar(keys, layers=46),
        **_windows(keys, keys.count("attention.sliding_window", 4096), period=2),
    }


def _gemma3(keys: GgufKeys) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, layers=62),
        LOCAL_THETA: keys.number("rope.freq_base_swa", _ROPE_BASE),
        **_windows(keys, keys.get("attention.sliding_window"), period=6),
    }


def _query_scalar(keys: GgufKeys, *, layers: int) -> int:
    """What queries are divided by the root of: only the model of 27 B, which llama.cpp knows by its
    layers, has another one than the dimensions of a head."""
    if keys["block_count"] == layers:
        return keys.count("embedding_length") // keys.count("attention.head_count")
    return _head_dim(keys)


def _olmo2(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    if not window:
        return {}
    base = keys.number("rope.freq_base", _ROPE_BASE)
    local = {LOCAL_THETA: keys.number("rope.freq_base_swa", base)}
    return {"model_type": "olmo3", **local, **_windows(keys, window, period=4)}


def _exaone4(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    return _windows(keys, window, period=4) if window else {"sliding_window": None}


def _exaone_moe(keys: GgufKeys) -> dict[str, Any]:
    layers, experts = _layers(keys), _sigmoid_experts(keys)
    shared = experts["n_shared_experts"] * experts["moe_intermediate_size"]
    keys.require("expert_shared_feed_forward_length", (None, shared))
    window = _windows(keys, keys.get("attention.sliding_window"), period=4)
    return (
        experts
        | window
        | {
            "num_hidden_layers": layers,
            "layer_types": window["layer_types"][:layers],
            "num_experts": experts["n_routed_experts"],
            "num_shared_experts": experts["n_shared_experts"],
        }
    )


def _phi3(keys: GgufKeys) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    settings = {
        "original_max_position_embeddings": original,
        "sliding_window": keys.get("attention.sliding_window") or None,
    }
    factors = {"short_factor": keys.divisors.get(SHORT), "long_factor": keys.divisors.get(LONG)}
    if all(numbers is None for numbers in factors.values()):
        return settings
    scaling: dict[str, Any] = {
        name: [shortest(number) for number in numbers]
        for name, numbers in factors.items()
        if numbers is not None
    }
    if keys.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return settings | {"rope_scaling": {"rope_type": "longrope", **scaling}}


def _mistral3(keys: GgufKeys) -> dict[str, Any]:
    if not keys.get("attention.temperature_scale"):
        keys.require("rope.scaling.type", (None, "none"))  # older llama.cpp has no factor of YaRN
        return {}
    keys.require("rope.scaling.type", ("yarn",))
    scaling = rope_scaling(keys, keys.number("rope.freq_base", _ROPE_BASE)) or {}
    weights = {"mscale": 1.0, "mscale_all_dim": keys.number("rope.scaling.yarn_log_multiplier")}
    growth = {"llama_4_scaling_beta": keys.number("attention.temperature_scale")}
    return {"model_type": "ministral3", "rope_scaling": scaling | weights | growth}


def _relu2(_: GgufKeys) -> dict[str, Any]:
    return {"hidden_act": "relu2"}


def _seed_oss(keys: GgufKeys) -> dict[str, Any]:
    return {"attention_out_bias": keys.has_tensor("blk.0.attn_output.bias")}


def _hunyuan_moe(keys: GgufKeys) -> dict[str, Any]:
    size = keys.count("expert_feed_forward_length")
    keys.require("expert_shared_count", (None, 1))
    keys.require("expert_shared_feed_forward_length", (None, size))
    return {
        "num_experts": keys.count("expert_count"),
        "moe_topk": keys.count("expert_used_count"),
        "intermediate_size": size,
    }


def _hy_v3(keys: GgufKeys) -> dict[str, Any]:
    layers, experts = _layers(keys), _sigmoid_experts(keys)
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
        "mlp_layer_types": ["dense" if each else "sparse" for each in dense],
    }


def _stablelm(keys: GgufKeys) -> dict[str, Any]:
    keys.get("use_parallel_residual")  # whatever it says
    return {
        "use_qkv_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
        "use_parallel_residual": not keys.has_tensor("blk.0.ffn_norm.weight"),
        "qk_layernorm": keys.has_tensor("blk.0.attn_q_norm.weight"),
    }


def _starcoder2(keys: GgufKeys) -> dict[str, Any]:
    bias = keys.has_tensor("blk.0.attn_q.bias")
    return {
        "use_bias": bias,
        "attention_bias": None,
        "mlp_bias": None,
        "sliding_window": keys.count("attention.sliding_window", _STARCODER2_WINDOW),
    }


def _apertus(_: GgufKeys) -> dict[str, Any]:
    return {"hidden_act": "xielu"}


def _smollm3(_: GgufKeys) -> dict[str, Any]:
    return {"no_rope_layer_interval": 4}


def _windows(keys: GgufKeys, size: int | None, *, period: int) -> dict[str, Any]:
    """The layers with a window: all but the last of every `period`, unless the file says which."""
    every = keys.by_layer("attention.sliding_window_pattern", period)
    layers = range(keys.count("block_count"))
    windowed = every if isinstance(every, list) else [i % every < every - 1 for i in layers]
    kinds = ["sliding_attention" if on else "full_attention" for on in windowed]
    return {"sliding_window": size or None, "layer_types": kinds}


def _head_dim(keys: GgufKeys) -> int:
    heads = keys.count("attention.head_count")
    return keys.count("attention.key_length", keys.count("embedding_length") // heads)


FAMILIES = {
    "llama": GgufFamily(
        model_type="llama", read=_llama, layout=_NEIGHBOURS, divisors=(FREQUENCIES,)
    ),
    "mistral3": GgufFamily(
        model_type="mistral", read=_mistral3, layout=_NEIGHBOURS, divisors=(FREQUENCIES,)
    ),
    "qwen2": GgufFamily(model_type="qwen2"),
    "qwen3": GgufFamily(model_type="qwen3"),
    "qwen2moe": GgufFamily(
        model_type="qwen2_moe",
        read=_qwen2_moe,
        layout=TensorLayout(axes={"mlp.shared_expert_gate.weight": 2}),
    ),
    "qwen3moe": GgufFamily(model_type="qwen3_moe", read=_qwen3_moe),
    "qwen2vl": GgufFamily(model_type="qwen2_5_vl", read=_seeing),
    "qwen3vl": GgufFamily(model_type="qwen3_vl", read=_seeing),
    "qwen3vlmoe": GgufFamily(model_type="qwen3_vl_moe", read=_qwen3_vl_moe),
    "smollm3": GgufFamily(model_type="smollm3", read=_smollm3, layout=_NEIGHBOURS),
    "granite": GgufFamily(model_type="granite", read=_granite, layout=_NEIGHBOURS),
    "granitemoe": GgufFamily(model_type="granitemoe", read=_granite_moe, layout=_NEIGHBOURS),
    "phi3": GgufFamily(
        model_type="phi3",
        read=_phi3,
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        layout=TensorLayout(modules=QKV_JOINED | GATE_UP_JOINED),
        divisors=(LONG, SHORT),
        partial_rotary=True,
    ),
    "olmo2": GgufFamily(model_type="olmo2", read=_olmo2, modules=_BOTH_NORMS),
    "olmoe": GgufFamily(model_type="olmoe", read=_olmoe),
    "chatglm": GgufFamily(
        model_type="glm",
        read=_chatglm,
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        layout=TensorLayout(modules=QKV_JOINED | GATE_UP_JOINED, rotates_neighbours=True),
        partial_rotary=True,
    ),
    "glm4": GgufFamily(
        model_type="glm4",
        modules={"ffn_up": "mlp.gate_up_proj", **_BOTH_NORMS},
        layout=TensorLayout(modules=GATE_UP_JOINED, rotates_neighbours=True),
        partial_rotary=True,
    ),
    "glm4moe": GgufFamily(
        model_type="glm4_moe", read=_glm4_moe, modules=_NORM_BEFORE, partial_rotary=True
    ),
    "gpt-oss": GgufFamily(model_type="gpt_oss", read=_gpt_oss, modules=_NORM_BEFORE),
    "minimax-m2": GgufFamily(model_type="minimax_m2", read=_minimax_m2, partial_rotary=True),
    "dots1": GgufFamily(model_type="dots1", read=_sigmoid_experts),
    "ernie4_5": GgufFamily(model_type="ernie4_5", read=_ernie, layout=_NEIGHBOURS),
    "ernie4_5-moe": GgufFamily(
        model_type="ernie4_5_moe",
        read=_ernie_moe,
        layout=TensorLayout(
            rotates_neighbours=True, axes={"mlp.router.e_score_correction_bias": 1}
        ),
    ),
    "command-r": GgufFamily(
        model_type="cohere", read=_command_r, layout=_NEIGHBOURS, epsilon=_EPSILON
    ),
    "cohere2": GgufFamily(
        model_type="cohere2", read=_cohere2, layout=_NEIGHBOURS, epsilon=_EPSILON
    ),
    "seed_oss": GgufFamily(model_type="seed_oss", read=_seed_oss, modules=_NORM_BEFORE),
    "nemotron": GgufFamily(
        model_type="nemotron",
        read=_relu2,
        partial_rotary=True,
        epsilon=_EPSILON,
    ),
    "exaone4": GgufFamily(
        model_type="exaone4", read=_exaone4, modules=_BOTH_NORMS, divisors=(FREQUENCIES,)
    ),
    "arcee": GgufFamily(
        model_type="arcee", read=_relu2, layout=_NEIGHBOURS, divisors=(FREQUENCIES,)
    ),
    "exaone-moe": GgufFamily(model_type="exaone_moe", read=_exaone_moe, divisors=(FREQUENCIES,)),
    "jais2": GgufFamily(model_type="jais2", read=_relu2, epsilon=_EPSILON),
    "apertus": GgufFamily(
        model_type="apertus", read=_apertus, divisors=(FREQUENCIES,), activations=True
    ),
    "hunyuan-dense": GgufFamily(model_type="hunyuan_v1_dense"),
    "hunyuan-moe": GgufFamily(model_type="hunyuan_v1_moe", read=_hunyuan_moe),
    "hy_v3": GgufFamily(model_type="hy_v3", read=_hy_v3),
    "stablelm": GgufFamily(
        model_type="stablelm", read=_stablelm, partial_rotary=True, epsilon=_EPSILON
    ),
    "starcoder2": GgufFamily(model_type="starcoder2", read=_starcoder2, epsilon=_EPSILON),
    "gemma": GgufFamily(model_type="gemma"),
    "gemma2": GgufFamily(model_type="gemma2", read=_gemma2, modules=_BOTH_NORMS),
    "gemma3": GgufFamily(model_type="gemma3_text", read=_gemma3, modules=_BOTH_NORMS),
}
"""By llama.cpp's name."""
