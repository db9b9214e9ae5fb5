"""StarCoder 2: layer norms, biases, a feed-forward without gates."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, GgufArchitecture, TensorLayout
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.windows import windows

_TANH = "gelu_pytorch_tanh"


def _read(config: ConfigReader) -> dict[str, Any]:
    activation, bias = config.get("hidden_act"), config.flag("use_bias", default=True)
    if activation != _TANH:
        raise config.unsupported("hidden_act", activation)
    return windows(config) | {
        "qkv_bias": bias,
        "output_bias": bias,
        "mlp_bias": bias,
        "layer_norm": True,
        "activation": _TANH,
        "gated": False,
    }


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    return {
        "use_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "attention_bias": None,
        "mlp_bias": None,
        "sliding_window": keys.count("attention.sliding_window", 4096),  # of all that are published
    }


STARCODER2 = Family(
    name="starcoder2",
    read=_read,
    defaults={"hidden_act": _TANH, "tie_word_embeddings": True},
    renamed={"norm_epsilon": "rms_norm_eps"},
    layout=TensorLayout(modules={"mlp.c_fc": ("mlp.up_proj",), "mlp.c_proj": ("mlp.down_proj",)}),
    gguf=GgufArchitecture(name="starcoder2", read=_gguf, layer_norm=True),
)
