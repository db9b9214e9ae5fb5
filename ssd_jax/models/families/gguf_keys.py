"""Metadata of a GGUF file under its architecture's prefix, with errors that name the key.

Where a file does not say what the model computes, llama.cpp knows it by the architecture, and so
do the families. Source: `convert_hf_to_gguf.py` and `src/models` of llama.cpp.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (None, True),
    "attention.clamp_kqv": (None, 0.0),
    "attention.max_alibi_bias": (None, 0.0),
    "attention.scale": (None, 0.0),
    "attention.shared_kv_layers": (None, 0),
    "attention.sliding_window": (None, 0),
    "attention.temperature_scale": (None, 0.0),
    "attn_logit_softcapping": (None, 0.0),
    "embedding_scale": (None, 0.0, 1.0),
    "expert_count": (None, 0),
    "expert_gating_func": (None, 0, 1),
    "expert_group_count": (None, 0, 1),
    "expert_shared_count": (None, 0),
    "expert_shared_feed_forward_length": (None, 0),
    "expert_weights_scale": (None, 0.0, 1.0),
    "final_logit_softcapping": (None, 0.0),
    "interleave_moe_layer_step": (None, 0, 1),
    "leading_dense_block_count": (None, 0),
    "logit_scale": (None, 0.0, 1.0),
    "nextn_predict_layers": (None, 0),
    "residual_scale": (None, 0.0, 1.0),
    "rope.dimension_sections": (None,),
    "rope.scaling.attn_factor": (None, 1.0),
    "rope.scaling.yarn_ext_factor": (None, 1.0),
    "rope.scaling.yarn_log_multiplier": (None, 0.0),
    "use_parallel_residual": (None, False),
}
"""Keys that change numbers, and values with which they do not, the usual one last."""

SIGMOID = 2
"""llama.cpp's number of experts' weights that are sigmoids."""


class GgufKeys:
    """What a header says of its decoder.

    Remembers the keys that were read: those of `_NEUTRAL` that were not must be neutral.

    Args:
      metadata: of the header.
      architecture: the prefix of its keys.
      tensors: names of the tensors, by ggml.
      divisors: the numbers by which frequencies of RoPE are divided, by name of their tensor.
      where: names the file in errors.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        architecture: str,
        tensors: Collection[str],
        divisors: Mapping[str, np.ndarray],
        where: str,
    ) -> None:
        self._metadata, self._prefix, self._tensors = metadata, architecture, tensors
        self._read: set[str] = set()
        self.divisors, self.where = divisors, where

    def has_tensor(self, name: str) -> bool:
        """Whether the file has a tensor, by ggml's name."""
        return name in self._tensors

    def error(self, key: str, problem: str) -> InputError:
        """An error about a key."""
        return InputError(f"{self.where}: {self._prefix}.{key}{problem}")

    def get(self, key: str, default: Any = None) -> Any:
        """A value for all layers; the default if it is missing.

        Raises:
          InputError: each layer has its own.
        """
        value = self.by_layer(key, default)
        if isinstance(value, list):
            raise self.error(
                key, f" differs from layer to layer ({shown(value)}), which is not supported"
            )
        return value

    def by_layer(self, key: str, default: Any = None) -> Any:
        """A value for all layers, or a list with one for each."""
        self._read.add(key)
        return self._metadata.get(f"{self._prefix}.{key}", default)

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InputError(f"{self.where}: metadata key {self._prefix}.{key} is missing")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) is not int or value < 1:
            raise self.error(key, f" = {shown(value)} must be a positive integer")
        return value

    def count_or_zero(self, key: str) -> int:
        """A positive integer; 0 where it is missing."""
        return self.count(key) if self.get(key) else 0

    def number(self, key: str, default: float | None = None) -> float:
        """A positive float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float(np.finfo(np.float32).max):
            raise self.error(key, f" = {shown(value)} must be a positive, finite number")
        return shortest(value)

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Refuses other values than these, of which None stands for a missing key."""
        value = self.by_layer(key)
        if value not in allowed:
            raise self.error(key, f" = {shown(value)} is not supported; expected {allowed[-1]!r}")

    def require_neutral(self) -> None:
        """Refuses keys that nobody has read and that would change numbers."""
        for key, allowed in _NEUTRAL.items():
            if key not in self._read:
                self.require(key, allowed)

    @property
    def head_dim(self) -> int:
        """Dimensions of a head."""
        heads = self.count("attention.head_count")
        return self.count("attention.key_length", self.count("embedding_length") // heads)

    @property
    def layers(self) -> int:
        """How many layers there are without those that predict tokens further on."""
        return self.count("block_count") - self.count_or_zero("nextn_predict_layers")

    def windows(self, size: int | None, *, period: int) -> dict[str, Any]:
        """The layers with a window, as config.json says it.

        All but the last of every `period`, unless the file says which.
        """
        every = self.by_layer("attention.sliding_window_pattern", period)
        layers = range(self.count("block_count"))
        windowed = every if isinstance(every, list) else [i % every < every - 1 for i in layers]
        kinds = ["sliding_attention" if on else "full_attention" for on in windowed]
        return {"sliding_window": size or None, "layer_types": kinds}

    def experts(self, count: str, chosen: str = "num_experts_per_tok") -> dict[str, Any]:
        """How many experts there are, and how many a token has, by these names of config.json."""
        return {count: self.count("expert_count"), chosen: self.count("expert_used_count")}

    def sigmoid_experts(self) -> dict[str, Any]:
        """Experts as DeepSeek-V3's config.json spells them."""
        self.require("expert_gating_func", (None, SIGMOID))
        return self.experts("n_routed_experts") | {
            "moe_intermediate_size": self.count("expert_feed_forward_length"),
            "n_shared_experts": self.count_or_zero("expert_shared_count"),
            "first_k_dense_replace": self.count_or_zero("leading_dense_block_count"),
            "norm_topk_prob": bool(self.get("expert_weights_norm", False)),
            "routed_scaling_factor": self.number("expert_weights_scale", 1.0),
        }


def shortest(value: float) -> float:
    """The number with the fewest decimals that is this one in float32."""
    return float(str(np.float32(value)))
