"""EXAONE 4: norms after, as OLMo 2, and of queries and keys.

Where some layers have a window, the others are not rotated.
"""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import NORMS_BEHIND, Family, TensorLayout
from ssd_jax.models.families.windows import rotated_windows


def _read(config: ConfigReader) -> dict[str, Any]:
    norms = {"qk_norm": True, "norm_placement": "post"}
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


EXAONE4 = Family(name="exaone4", read=_read, layout=TensorLayout(modules=NORMS_BEHIND))
