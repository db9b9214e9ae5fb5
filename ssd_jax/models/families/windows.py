"""How config.json says which layers see a window of tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssd_jax.models.config_reader import ConfigReader

_WINDOWED = {"full_attention": False, "sliding_attention": True}


def windows(
    config: ConfigReader, *, default: Sequence[bool] | None = None, always: bool = False
) -> dict[str, Any]:
    """The layers with a window, and its size; none where it is as long as the model's context.

    Args:
      default: whether each layer has one, where `layer_types` is missing; None is all.
      always: whether they differ in more than the window, and so are told apart however long it is.

    Raises:
      InputError: `layer_types` has an unknown kind of attention, or not one for each layer.
    """
    key, windows = "sliding_window", windowed(config, default=default)
    if config.get(key) is None or not any(windows):
        return {}
    size = config.count(key)
    if size >= config.count("max_position_embeddings") and not always:
        return {}
    kinds = tuple("window" if window else "full" for window in windows)
    return {"layer_kinds": kinds, "window": size}


def rotated_windows(
    config: ConfigReader, *, default: Sequence[bool], context: int
) -> dict[str, Any]:
    """As `windows`, of a decoder that rotates in layers with a window alone, however long it is."""
    size = config.count("sliding_window")
    rotated = "window" if size < context else "full"
    kinds = tuple(rotated if on else "nope" for on in windowed(config, default=default))
    return {"layer_kinds": kinds, "window": size if "window" in kinds else None}


def windowed(config: ConfigReader, *, default: Sequence[bool] | None = None) -> list[bool]:
    """Whether each layer has a window; see `windows`."""
    count, types = config.count("num_hidden_layers"), config.get("layer_types")
    if types is None:
        found = [*(default or [True] * count)]
    else:
        unknown = [kind for kind in types if kind not in _WINDOWED]
        if unknown:
            raise config.unsupported("layer_types", unknown[0])
        found = [_WINDOWED[kind] for kind in types]
    if len(found) != count:
        raise config.unsupported("layer_types", types or found, f"there are {count} layers")
    return found
