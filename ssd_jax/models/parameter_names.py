"""Names of parameters, and of the checkpoint tensors that are in them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ssd_jax.models.config import ModelConfig

EMBEDDING = "model.embed_tokens."
SCALE = "_scale"
"""Suffix to a weight's name: the scales of its int8 rows, or of its groups."""
MINIMUM = "_minimum"
"""Suffix to a weight's name: the minima of its groups."""


def parameter_name(path: Sequence[Any]) -> str:
    """The name of a parameter at a path of a `CausalLM`."""
    return ".".join(map(str, path)).replace("model.first_layers.", "model.layers.")


def can_scan(config: ModelConfig) -> bool:
    """Whether all layers behind the first ones without experts have experts."""
    experts = config.mechanisms.experts
    return experts is None or experts.dense_layers == tuple(range(len(experts.dense_layers)))


def tensors_of(name: str, config: ModelConfig, *, scan_layers: bool) -> list[str]:
    """Checkpoint tensors of a parameter: one, or one for each scanned layer."""
    _, layers, rest = name.partition("model.layers.")
    if not (scan_layers and layers) or rest[0].isdigit():
        return [name]
    experts = config.mechanisms.experts
    first = len(experts.dense_layers) if experts is not None else 0
    return [f"{layers}{i}.{rest}" for i in range(first, config.num_layers)]
