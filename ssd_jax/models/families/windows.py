"""How config.json says which layers see a window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssd_jax.models.config_reader import ConfigReader

_KINDS = {"full_attention": "full", "sliding_attention": "window"}


def windows(
    config: ConfigReader, *, default: Sequence[bool] | None = None, key: str = "sliding_window"
) -> dict[str, Any]:
    """The layers with a window, and its size; none where it is as long as the model's context.

    Args:
      default: whether each layer has one, where `layer_types` is missing; None is all.

    Raises:
      InputError: `layer_types` has an unknown kind of attention, or not one for each layer.
    """
    count, size = config.count("num_hidden_layers"), config.get(key)
    types = config.get("layer_types")
    if types is None:
        kinds = ["window" if on else "full" for on in default or [True] * count]
    else:
        unknown = [kind for kind in types if kind not in _KINDS]
        if unknown:
            raise config.unsupported("layer_types", unknown[0])
        kinds = [_KINDS[kind] for kind in types]
    if len(kinds) != count:
        raise config.unsupported("layer_types", kinds, f"there are {count} layers")
    if size is None or "window" not in kinds:
        return {}
    if config.count(key) >= config.count("max_position_embeddings"):
        return {}
    return {"layer_kinds": tuple(kinds), "window": config.count(key)}
