"""Command R, R+ and A: attention and feed-forward side by side, behind one norm without a bias.

Command R+ has norms of the heads of queries and keys. Of the newer ones, layers with a window are
rotated, and the others are not.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import Family, TensorLayout
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


_DEFAULTS = {"tie_word_embeddings": True, "rms_norm_eps": 1e-5}
_RENAMED = {"layer_norm_eps": "rms_norm_eps"}
_LAYOUT = TensorLayout(rotates_neighbours=True)
COHERE = Family(
    name="cohere",
    read=_read,
    defaults=_DEFAULTS | {"rope_theta": 500000.0},
    renamed=_RENAMED,
    layout=_LAYOUT,
)
COHERE2 = Family(name="cohere2", read=_read2, defaults=_DEFAULTS, renamed=_RENAMED, layout=_LAYOUT)
