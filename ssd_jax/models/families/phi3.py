"""Phi 3, 3.5 and 4: joined matrices, partial RoPE, longrope."""

from typing import Any

from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.family import (
    GATE_UP_JOINED,
    QKV_JOINED,
    Family,
    GgufArchitecture,
    TensorLayout,
    partial_rotary,
)
from ssd_jax.models.families.gguf_keys import GgufKeys, shortest
from ssd_jax.models.families.gguf_rope import LONG, SHORT
from ssd_jax.models.families.windows import windows


def _read(config: ConfigReader) -> dict[str, Any]:
    return partial_rotary(config) | windows(config)


def _gguf(keys: GgufKeys) -> dict[str, Any]:
    original = keys.count("rope.scaling.original_context_length", keys.count("context_length"))
    settings = {
        "original_max_position_embeddings": original,
        "sliding_window": keys.get("attention.sliding_window") or None,
    }
    factors = {"short_factor": keys.divisors.get(SHORT), "long_factor": keys.divisors.get(LONG)}
    scaling: dict[str, Any] = {
        name: [shortest(number) for number in numbers]
        for name, numbers in factors.items()
        if numbers is not None
    }
    if not scaling:
        return settings
    if keys.get("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = keys.number("rope.scaling.attn_factor")
    return settings | {"rope_scaling": {"rope_type": "longrope", **scaling}}


_LAYOUT = TensorLayout(modules=QKV_JOINED | GATE_UP_JOINED)
PHI3 = Family(
    name="phi3",
    read=_read,
    layout=_LAYOUT,
    gguf=GgufArchitecture(
        name="phi3",
        read=_gguf,
        modules={"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
        layout=_LAYOUT,
        divisors=(LONG, SHORT),
        partial_rotary=True,
    ),
)
