"""Gemma 1, 2 and 3, of which only the text part; VaultGemma is Gemma 2 without norms after."""

import dataclasses
import math
from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    GGUF_BOTH_NORMS,
    LOCAL_THETA,
    TEXT_PREFIXES,
    Family,
    GgufArchitecture,
    TensorLayout,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Multipliers

_TANH = "gelu_pytorch_tanh"
_NORMS = {
    "post_attention_layernorm": ("attention_output_norm",),
    "pre_feedforward_layernorm": ("post_attention_layernorm",),
    "post_feedforward_layernorm": ("mlp_output_norm",),
}


def _gemma(config: ConfigReader) -> dict[str, Any]:
    # Early files of Gemma 1 say gelu in one key; the model was trained with the approximation.
    activations = {config.get("hidden_act"), config.get("hidden_activation")}
    early = {"gelu"} if config.get("model_type") == "gemma" else set()
    if not activations <= {None, _TANH} | early:
        raise config.unsupported("hidden_activation", activations)
    bias = config.flag("attention_bias")
    scale = config.get("query_pre_attn_scalar")
    multipliers = Multipliers(
        embedding=math.sqrt(config.count("hidden_size")),
        scores=None if scale is None else config.positive("query_pre_attn_scalar") ** -0.5,
    )
    fields = {"qkv_bias": bias, "output_bias": bias}
    return fields | {"activation": _TANH, "multipliers": multipliers}


def _gemma2(config: ConfigReader) -> dict[str, Any]:
    layers = range(config.count("num_hidden_layers"))
    caps = {
        name: float(config.positive(key))
        for name, key in (
            ("score_soft_cap", "attn_logit_softcapping"),
            ("logit_soft_cap", "final_logit_softcapping"),
        )
        if config.get(key) is not None
    }
    pattern = windows(config, default=[layer % 2 == 0 for layer in layers])
    return _gemma(config) | caps | pattern | {"norm_placement": "both"}


def _vault(config: ConfigReader) -> dict[str, Any]:
    return _gemma2(config) | {"norm_placement": "pre"}


def _gemma3(config: ConfigReader) -> dict[str, Any]:
    layers, every = range(config.count("num_hidden_layers")), config.count("sliding_window_pattern")
    default = [(layer + 1) % every != 0 for layer in layers]
    pattern = windows(config, default=default, always=True)
    if pattern:
        pattern["window_rope_theta"] = float(config.positive(LOCAL_THETA))
    return _gemma(config) | pattern | {"qk_norm": True, "norm_placement": "both"}


def _gguf2(keys: GgufKeys) -> dict[str, Any]:
    caps = ("attn_logit_softcapping", "final_logit_softcapping")
    return {
        **{cap: keys.number(cap) for cap in caps if keys.get(cap) is not None},
        "query_pre_attn_scalar": _query_scalar(keys, layers=46),
        **keys.windows(keys.count("attention.sliding_window", 4096), period=2),
    }


def _gguf3(keys: GgufKeys) -> dict[str, Any]:
    return {
        "query_pre_attn_scalar": _query_scalar(keys, layers=62),
        LOCAL_THETA: keys.number("rope.freq_base_swa", 10000.0),
        **keys.windows(keys.get("attention.sliding_window"), period=6),
    }


def _query_scalar(keys: GgufKeys, *, layers: int) -> int:
    """What queries are divided by the root of: only the model of 27 B, which llama.cpp knows by its
    layers, has another one than the dimensions of a head."""
    if keys["block_count"] == layers:
        return keys.count("embedding_length") // keys.count("attention.head_count")
    return keys.head_dim


_DEFAULTS: dict[str, Any] = {"tie_word_embeddings": True, "rms_norm_eps": 1e-6}
GEMMA = Family(
    name="gemma",
    read=_gemma,
    defaults=_DEFAULTS,
    layout=TensorLayout(norm_offset=1.0),
    gguf=GgufArchitecture(name="gemma"),
)
_LAYOUT = TensorLayout(modules=_NORMS, norm_offset=1.0)
_GEMMA2 = _DEFAULTS | {
    "query_pre_attn_scalar": 256,
    "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
    "sliding_window": 4096,
    "max_position_embeddings": 8192,
}
GEMMA2 = Family(
    name="gemma2",
    read=_gemma2,
    defaults=_GEMMA2,
    layout=_LAYOUT,
    gguf=GgufArchitecture(name="gemma2", read=_gguf2, modules=GGUF_BOTH_NORMS),
)
VAULTGEMMA = Family(name="vaultgemma", read=_vault, defaults=_GEMMA2, layout=_LAYOUT)
_GEMMA3 = _DEFAULTS | {
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "sliding_window_pattern": 6,
    "rope_theta": 1e6,
    LOCAL_THETA: 1e4,
    "max_position_embeddings": 131072,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262208,
}
GEMMA3_TEXT = Family(
    name="gemma3_text",
    read=_gemma3,
    defaults=_GEMMA3,
    local_rope=True,
    layout=_LAYOUT,
    gguf=GgufArchitecture(name="gemma3", read=_gguf3, modules=GGUF_BOTH_NORMS),
)
GEMMA3 = Family(
    name="gemma3",
    read=_gemma3,
    defaults=_GEMMA3,
    local_rope=True,
    part="text_config",
    layout=dataclasses.replace(_LAYOUT, prefixes=TEXT_PREFIXES),
)
