"""Model configuration of a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ssd_jax.checkpoints.gguf_header import Header
from ssd_jax.checkpoints.gguf_rope import rope_scaling
from ssd_jax.errors import InputError
from ssd_jax.files import shown
from ssd_jax.models.config import FAMILIES, ModelConfig


def model_config(header: Header, divisors: np.ndarray | None, *, where: str) -> ModelConfig:
    """The configuration that a GGUF header describes.

    Args:
      header: of the file.
      divisors: the tensor `rope_freqs.weight`, [head_dim / 2], if there is one.
      where: names the file in errors.

    Raises:
      InputError: an architecture or feature that the decoder lacks, or a missing key.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in FAMILIES:
        raise InputError(
            f"{where}: GGUF architecture {shown(architecture)} is not supported; supported: "
            f"{', '.join(FAMILIES)}"
        )
    keys = _Keys(header.metadata, architecture, where)
    keys.require("expert_count", (None, 0))
    keys.require("attention.sliding_window", (None, 0))
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    keys.require("attention.value_length", (None, head_dim))
    keys.require("rope.dimension_count", (None, head_dim))
    base = keys.number("rope.freq_base", 10000.0)
    config = {
        "model_type": architecture,
        "vocab_size": _rows(header, "token_embd.weight", where),
        "hidden_size": hidden,
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "rope_scaling": rope_scaling(
            header.metadata, architecture, divisors, base=base, where=where
        ),
        "max_position_embeddings": keys["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    return ModelConfig.from_hf(config, where=where)


class _Keys:
    """Metadata under the architecture's prefix."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self._metadata = metadata
        self._prefix = architecture
        self._where = where

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):
            raise InputError(
                f"{self._where}: {self._prefix}.{key} differs from layer to layer "
                f"({shown(value)}), which is not supported"
            )
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InputError(f"{self._where}: metadata key {self._prefix}.{key} is missing")
        return value

    def count(self, key: str) -> int:
        value = self[key]
        if type(value) is not int or value < 1:
            raise InputError(
                f"{self._where}: {self._prefix}.{key} = {shown(value)} must be a positive integer"
            )
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """The shortest decimal that gives a float32: 1e-05, not 9.999999747378752e-06."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float(np.finfo(np.float32).max):
            raise InputError(
                f"{self._where}: {self._prefix}.{key} = {shown(value)} must be a positive, finite "
                "number"
            )
        return float(str(np.float32(value)))

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value not in allowed:
            raise InputError(
                f"{self._where}: {self._prefix}.{key} = {shown(value)} is not supported; expected "
                f"{allowed[-1]!r}"
            )


def _rows(header: Header, name: str, where: str) -> int:
    if name not in header.tensors:
        raise InputError(f"{where}: tensor {name!r} is missing; the file is not a whole model")
    return header.tensors[name].shape[0]
