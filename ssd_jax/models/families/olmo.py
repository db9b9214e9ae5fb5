"""OLMo 2 and 3, and OLMoE: norms of all heads of queries and keys.

OLMo 2 and 3 have norms after attention and feed-forward, too.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    EXPERTS_APART,
    GGUF_BOTH_NORMS,
    LOCAL_THETA,
    NORMS_BEHIND,
    Family,
    GgufArchitecture,
    TensorLayout,
    biases,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import rope_base
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Experts

_THETA = 500000.0
_LAYOUT = TensorLayout(modules=NORMS_BEHIND)


def _olmo2(config: ConfigReader) -> dict[str, Any]:
    return biases(config) | {"qk_norm": True, "joint_qk_norm": True, "norm_placement": "post"}


def _olmo3(config: ConfigReader) -> dict[str, Any]:
    default = [(layer + 1) % 4 != 0 for layer in range(config.count("num_hidden_layers"))]
    pattern = windows(config, default=default, always=True)
    if pattern:
        theta = config.get(LOCAL_THETA) or config.positive("rope_theta", _THETA)
        pattern["window_rope_theta"] = float(theta)
    return _olmo2(config) | pattern


def _olmoe(config: ConfigReader) -> dict[str, Any]:
    if config.get("clip_qkv") is not None:
        raise config.unsupported("clip_qkv", config.get("clip_qkv"), "nothing is clipped")
    experts = Experts(
        count=config.count("num_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
        normalized=config.flag("norm_topk_prob"),
    )
    return biases(config) | {"qk_norm": True, "joint_qk_norm": True, "experts": experts}


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    window = keys.get("attention.sliding_window")
    if not window:
        return {}
    local = {LOCAL_THETA: keys.number("rope.freq_base_swa", rope_base(keys))}
    return {"model_type": "olmo3", **local, **keys.windows(window, period=4)}


OLMO2 = Family(
    name="olmo2",
    read=_olmo2,
    layout=_LAYOUT,
    gguf=GgufArchitecture(name="olmo2", read=_gguf, modules=GGUF_BOTH_NORMS),
)
OLMO3 = Family(
    name="olmo3",
    read=_olmo3,
    defaults={"rope_theta": _THETA},
    local_rope=True,
    layout=_LAYOUT,
)
OLMOE = Family(
    name="olmoe",
    read=_olmoe,
    layout=TensorLayout(modules={"mlp.gate": ("mlp.router",)}, experts=EXPERTS_APART),
    gguf=GgufArchitecture(name="olmoe", read=lambda keys: keys.experts("num_experts")),
)
