"""gpt-oss: sinks, windows in every other layer, experts with biases and clamped gates."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    GGUF_NORM_BEFORE,
    ExpertArrays,
    Family,
    GgufArchitecture,
    TensorLayout,
)
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import rope_scaling
from ssd_jax.models.families.windows import windows
from ssd_jax.models.mechanisms import Experts

_ALPHA = 1.702  # of `quick_gelu`


def _read(config: ConfigReader) -> dict[str, Any]:
    alpha = config.positive("swiglu_alpha", _ALPHA)
    if alpha != _ALPHA:
        raise config.unsupported("swiglu_alpha", alpha, f"gates have {_ALPHA}")
    layers = range(config.count("num_hidden_layers"))
    bias = config.flag("attention_bias", default=True)
    experts = Experts(
        count=config.count("num_local_experts"),
        chosen=config.count("num_experts_per_tok"),
        intermediate=config.count("intermediate_size"),
        router_bias=True,
        biases=True,
    )
    return windows(config, default=[layer % 2 == 0 for layer in layers]) | {
        "qkv_bias": bias,
        "output_bias": bias,
        "sinks": True,
        "activation": "quick_gelu",
        "gate_limit": float(config.positive("swiglu_limit", 7.0)),
        "experts": experts,
    }


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    scaling = rope_scaling(keys)
    if scaling is not None and scaling["rope_type"] == "yarn":
        scaling["truncate"] = False  # files do not say it
    return keys.experts("num_local_experts") | {
        "intermediate_size": keys.count("expert_feed_forward_length"),
        "rope_scaling": scaling,
        **keys.windows(keys.get("attention.sliding_window"), period=2),
    }


GPT_OSS = Family(
    name="gpt_oss",
    read=_read,
    layout=TensorLayout(
        expert_arrays=ExpertArrays(
            modules={
                "mlp.experts.gate_up_proj": ("mlp.experts.gate_proj", "mlp.experts.up_proj"),
                "mlp.experts.down_proj": ("mlp.experts.down_proj",),
            },
            interleaved=True,
        )
    ),
    gguf=GgufArchitecture(name="gpt-oss", read=_gguf, modules=GGUF_NORM_BEFORE),
)
