"""Apertus: norms of queries and keys, and xIELU in a feed-forward without gates."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, GgufArchitecture, TensorLayout
from ssd_jax.models.families.gguf_rope import FREQUENCIES
from ssd_jax.models.mechanisms import XIELU_LARGEST, XIELU_SLOPE


def _read(config: ConfigReader) -> dict[str, Any]:
    activation, bias = config.get("hidden_act"), config.flag("attention_bias")
    if activation != "xielu":
        raise config.unsupported("hidden_act", activation)
    biases = {"qkv_bias": bias, "output_bias": bias}
    return biases | {"qk_norm": True, "activation": "xielu", "gated": False}


APERTUS = Family(
    name="apertus",
    read=_read,
    defaults={"hidden_act": "xielu"},
    layout=TensorLayout(
        modules={
            "attention_layernorm": ("input_layernorm",),
            "feedforward_layernorm": ("post_attention_layernorm",),
        },
        constants={"mlp.act_fn.beta": XIELU_SLOPE, "mlp.act_fn.eps": XIELU_LARGEST},
    ),
    gguf=GgufArchitecture(name="apertus", divisors=(FREQUENCIES,), activations=True),
)
