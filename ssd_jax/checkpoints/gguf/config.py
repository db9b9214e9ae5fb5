"""Model configuration of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from ssd_jax.checkpoints.gguf.header import Header
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.models.families.family import GgufArchitecture
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.models.families.gguf_rope import rope_base, rope_scaling
from ssd_jax.models.families.registry import ARCHITECTURES, needs
from ssd_jax.system.files import shown


def architecture_of(header: Header, *, where: str) -> tuple[str, GgufArchitecture]:
    """The `model_type` of the architecture that a header names, and what its files have.

    Raises:
      InputError: it is not supported.
    """
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InputError(
            f"{where}: GGUF architecture {shown(name)} is not supported{needs(name)}; "
            f"supported: {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[name]


def has_predicting_layers(header: Header) -> bool:
    """Whether the last layers predict tokens further on; they are left out."""
    architecture = header.metadata["general.architecture"]
    return bool(header.metadata.get(f"{architecture}.nextn_predict_layers"))


def model_config(header: Header, divisors: Mapping[str, np.ndarray], *, where: str) -> ModelConfig:
    """The configuration that a GGUF header describes; `where` names the file in errors.

    Args:
      divisors: tensors with numbers by which frequencies of RoPE are divided, by name.

    Raises:
      InputError: the decoder lacks an architecture or a feature, or a key is missing.
    """
    model_type, architecture = architecture_of(header, where=where)
    keys = GgufKeys(header.metadata, architecture.name, header.tensors, divisors, where)
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.head_dim
    keys.require("attention.value_length", (None, head_dim))
    if not architecture.partial_rotary:
        keys.require("rope.dimension_count", (None, head_dim))
    if "token_embd.weight" not in header.tensors:
        raise InputError(
            f"{where}: tensor 'token_embd.weight' is missing; the file is not a whole model"
        )
    epsilon = "epsilon" if architecture.layer_norm else "rms_epsilon"
    config = {
        "model_type": model_type,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number(f"attention.layer_norm_{epsilon}"),
        "rope_theta": rope_base(keys),
        "rope_scaling": rope_scaling(keys),
        "max_position_embeddings": keys["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": keys.has_tensor("blk.0.attn_q.bias"),
        "mlp_bias": keys.has_tensor("blk.0.ffn_up.bias"),
    }
    if architecture.partial_rotary:
        rotated = keys.count("rope.dimension_count", head_dim)
        config["partial_rotary_factor"] = rotated / head_dim
    config |= architecture.read(keys)
    keys.require_neutral()
    return ModelConfig.from_hf(config, source=where)
