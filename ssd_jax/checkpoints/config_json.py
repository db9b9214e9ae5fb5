"""A `ModelConfig` as Hugging Face's `config.json` spells it."""

from __future__ import annotations

from typing import Any

from ssd_jax.models.config import ModelConfig, RopeScaling

_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """A dictionary of plain JSON values; `ModelConfig.from_hf` gives `config` back."""
    return {
        "architectures": [_ARCHITECTURES[config.family]],
        "model_type": config.family,
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if config.rope_scaling is None else _scaling(config.rope_scaling),
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _scaling(scaling: RopeScaling) -> dict[str, Any]:
    if scaling.kind == "linear":
        return {"rope_type": "linear", "factor": scaling.factor}
    return {
        "rope_type": "llama3",
        "factor": scaling.factor,
        "low_freq_factor": scaling.low_freq_factor,
        "high_freq_factor": scaling.high_freq_factor,
        "original_max_position_embeddings": scaling.original_context,
    }
