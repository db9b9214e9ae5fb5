"""EXAONE 4: norms after, as OLMo 2, and of queries and keys. K-EXAONE: norms before, experts.

Where some layers have a window, the others are not rotated.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    GGUF_BOTH_NORMS,
    NORMS_BEHIND,
    SHARED_EXPERTS,
    Family,
    GgufArchitecture,
    TensorLayout,
    sigmoid_experts,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import FREQUENCIES
from ssd_jax.models.families.windows import rotated_windows


def _dense(config: ConfigReader) -> dict[str, Any]:
    return _attention(config) | {"norm_placement": "post"}


def _moe(config: ConfigReader) -> dict[str, Any]:
    return _attention(config) | sigmoid_experts(config)


def _attention(config: ConfigReader) -> dict[str, Any]:
    norms = {"qk_norm": True}
    key, layers = "sliding_window_pattern", range(config.count("num_hidden_layers"))
    pattern = config.get(key) or 4
    if config.get("sliding_window") is None:
        return norms
    if isinstance(pattern, str):  # LLLG
        default = [pattern[layer % len(pattern)] == "L" for layer in layers]
    else:
        default = [(layer + 1) % pattern != 0 for layer in layers]
    context = config.count("max_position_embeddings")
    return norms | rotated_windows(config, default=default, context=context)


def _gguf_dense(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    return keys.windows(window, period=4) if window else {"sliding_window": None}


def _gguf_moe(keys: GgufKeys) -> dict[str, Any]:
    layers, experts = keys.layers, keys.sigmoid_experts()
    count, shared = experts.pop("n_routed_experts"), experts.pop("n_shared_experts")
    size = shared * experts["moe_intermediate_size"]
    keys.require("expert_shared_feed_forward_length", (None, size))
    window = keys.windows(keys.get("attention.sliding_window"), period=4)
    return (
        experts
        | window
        | {
            "num_hidden_layers": layers,
            "layer_types": window["layer_types"][:layers],
            "num_experts": count,
            "num_shared_experts": shared,
        }
    )


EXAONE4 = Family(
    name="exaone4",
    read=_dense,
    layout=TensorLayout(modules=NORMS_BEHIND),
    gguf=GgufArchitecture(
        name="exaone4", read=_gguf_dense, modules=GGUF_BOTH_NORMS, divisors=(FREQUENCIES,)
    ),
)
EXAONE_MOE = Family(
    name="exaone_moe",
    read=_moe,
    defaults={
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "sliding_window": 4096,
    },
    renamed={"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    layout=TensorLayout(
        modules={"mlp.gate": ("mlp.router",), "mlp": ("mlp.router",)} | SHARED_EXPERTS,
        experts=EXPERTS_APART,
    ),
    gguf=GgufArchitecture(name="exaone-moe", read=_gguf_moe, divisors=(FREQUENCIES,)),
)
