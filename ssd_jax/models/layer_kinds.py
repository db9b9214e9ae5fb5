"""What attention of a layer differs in, by the layer's number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int32

from ssd_jax.kernels.tree_attention.variant import NOTHING, AttentionVariant
from ssd_jax.models.config import ModelConfig


def attention_variant(config: ModelConfig, layer: int | Int32[Array, ""]) -> AttentionVariant:
    """The attention of a layer, whose number may be traced."""
    m = config.mechanisms
    sizes = [m.window if m.kind(i) == "window" else None for i in range(config.num_layers)]
    windows: tuple[int, ...] = ()
    if isinstance(layer, int) or len({*sizes}) == 1:
        window: jax.Array | int | None = sizes[layer if isinstance(layer, int) else 0]
    else:
        windows = tuple(NOTHING if size is None else size for size in sizes)
        window = jnp.asarray(windows)[layer]
    return AttentionVariant(
        window=window,
        layer_windows=windows,
        soft_cap=m.score_soft_cap,
        scale=m.multipliers.scores,
    )
