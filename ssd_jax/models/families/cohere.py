"""Command R, R+ and A: attention and feed-forward side by side, behind one norm without a bias.

Command R+ has norms of the heads of queries and keys. Of the newer ones, layers with a window are
rotated, and the others are not.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import NEIGHBOURS, Family, GgufArchitecture
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.windows import rotated_windows
from ssd_jax.models.mechanisms import Multipliers

_ONLY = {
    "rotary_pct": (1, None),
    "use_parallel_block": (True, None),
    "use_gated_activation": (True, None),
    "position_embedding_type": ("rope_gptj", None),
    "order_of_interleaved_layers": ("local_attn_first", None),
}
"""Keys with values that these models have; other ones would be other models."""


def _read(config: ConfigReader) -> dict[str, Any]:
    norms = config.flag("use_qk_norm")
    return _command(config) | {"qk_norm": norms, "head_qk_norm": norms}


def _command(config: ConfigReader) -> dict[str, Any]:
    for key, values in _ONLY.items():
        if config.get(key) not in values:
            raise config.unsupported(key, config.get(key))
    bias, context = config.flag("attention_bias"), config.count("max_position_embeddings")
    return {
        "qkv_bias": bias,
        "output_bias": bias,
        "layer_norm": True,
        "norm_bias": False,
        "parallel": True,
        "multipliers": Multipliers(logits=float(config.positive("logit_scale", 0.0625))),
        "max_context": config.count("model_max_length", context),
    }


def _read2(config: ConfigReader) -> dict[str, Any]:
    read, period = _command(config), config.count("sliding_window_pattern", 4)
    layers = range(config.count("num_hidden_layers"))
    default = [(layer + 1) % period != 0 for layer in layers]
    return read | rotated_windows(config, default=default, context=read["max_context"])


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    norms = keys.has_tensor("blk.0.attn_q_norm.weight")
    return {"logit_scale": keys.number("logit_scale"), "use_qk_norm": norms}


def _gguf2(keys: GgufKeys) -> dict[str, Any]:
    window = keys.count("attention.sliding_window")
    return {"logit_scale": keys.number("logit_scale"), **keys.windows(window, period=4)}


_DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_RENAMED = {"layer_norm_eps": "rms_norm_eps"}
COHERE = Family(
    name="cohere",
    read=_read,
    defaults=_DEFAULTS | {"rope_theta": 500000.0},
    renamed=_RENAMED,
    layout=NEIGHBOURS,
    gguf=GgufArchitecture(name="command-r", read=_gguf, layout=NEIGHBOURS, layer_norm=True),
)
COHERE2 = Family(
    name="cohere2",
    read=_read2,
    defaults=_DEFAULTS,
    renamed=_RENAMED,
    layout=NEIGHBOURS,
    gguf=GgufArchitecture(name="cohere2", read=_gguf2, layout=NEIGHBOURS, layer_norm=True),
)
