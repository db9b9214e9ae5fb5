"""gpt-oss: sinks, windows in every other layer, experts with biases and clamped gates."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import ExpertArrays, Family, TensorLayout
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
)
