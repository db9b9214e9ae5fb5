"""Model configuration of a GGUF file.

llama.cpp's converter stores Llama 3.1 RoPE scaling as one divisor per frequency
(`rope_freqs.weight`) instead of the four numbers it was computed from; they are recovered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ssd_jax.checkpoints.gguf_header import Header
from ssd_jax.errors import InputError
from ssd_jax.models.config import ModelConfig
from ssd_jax.system.files import shown

ARCHITECTURES = ("llama", "qwen2", "qwen3")
"""Supported ones, by ggml's names, which are also those of families."""

_CONTEXT = 8192  # only ratios to it matter: (low, high, context) can be scaled together
_TOLERANCE = 1e-4


def model_config(header: Header, divisors: np.ndarray | None, *, where: str) -> ModelConfig:
    """The configuration that a GGUF header describes; `where` names the file in errors.

    Args:
      divisors: the tensor `rope_freqs.weight`, [head_dim / 2], if there is one.

    Raises:
      InputError: the decoder lacks an architecture or a feature, or a key is missing.
    """
    architecture = header.metadata.get("general.architecture")
    if architecture not in ARCHITECTURES:
        raise InputError(
            f"{where}: GGUF architecture {shown(architecture)} is not supported; supported: "
            f"{', '.join(ARCHITECTURES)}"
        )
    keys = _ModelKeys(header.metadata, architecture, where)
    keys.require("expert_count", (None, 0))
    keys.require("attention.sliding_window", (None, 0))
    keys.require("attention.causal", (None, True))
    keys.require("rope.scaling.attn_factor", (None, 1.0))
    heads, hidden = keys.count("attention.head_count"), keys.count("embedding_length")
    head_dim = keys.get("attention.key_length", hidden // heads)
    keys.require("attention.value_length", (None, head_dim))
    keys.require("rope.dimension_count", (None, head_dim))
    base = keys.number("rope.freq_base", 10000.0)
    if "token_embd.weight" not in header.tensors:
        raise InputError(
            f"{where}: tensor 'token_embd.weight' is missing; the file is not a whole model"
        )
    config = {
        "model_type": architecture,
        "vocab_size": header.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": keys["feed_forward_length"],
        "num_hidden_layers": keys["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": keys.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": keys.number("attention.layer_norm_rms_epsilon"),
        "rope_theta": base,
        "rope_scaling": _rope_scaling(keys, divisors, base),
        "max_position_embeddings": keys["context_length"],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
    }
    return ModelConfig.from_hf(config, source=where)


class _ModelKeys:
    """Metadata under the architecture's prefix; refuses missing or unsupported values."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self._metadata, self._prefix, self.where = metadata, architecture, where

    def _error(self, key: str, problem: str) -> InputError:
        return InputError(f"{self.where}: {self._prefix}.{key}{problem}")

    def get(self, key: str, default: Any = None) -> Any:
        value = self._metadata.get(f"{self._prefix}.{key}", default)
        if isinstance(value, list):
            raise self._error(
                key, f" differs from layer to layer ({shown(value)}), which is not supported"
            )
        return value

    def __getitem__(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise InputError(f"{self.where}: metadata key {self._prefix}.{key} is missing")
        return value

    def count(self, key: str) -> int:
        value = self[key]
        if type(value) is not int or value < 1:
            raise self._error(key, f" = {shown(value)} must be a positive integer")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """A float32 as its shortest decimal: 1e-05, not 9.999999747378752e-06."""
        value = self[key] if default is None else self.get(key, default)
        if type(value) not in (int, float) or not 0 < value < float(np.finfo(np.float32).max):
            raise self._error(key, f" = {shown(value)} must be a positive, finite number")
        return float(str(np.float32(value)))

    def require(self, key: str, allowed: tuple[Any, ...]) -> None:
        value = self.get(key)
        if value not in allowed:
            raise self._error(key, f" = {shown(value)} is not supported; expected {allowed[-1]!r}")


def _rope_scaling(
    keys: _ModelKeys, divisors: np.ndarray | None, base: float
) -> dict[str, Any] | None:
    """RoPE scaling as in Hugging Face's `config.json`, or None."""
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))  # before 2023-11
    if kind is None and factor is not None:
        kind = "linear"
    unscaled = kind in (None, "none") or (kind == "linear" and factor in (None, 0, 1))
    if divisors is None or np.all(divisors == 1):
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            scaling["original_max_position_embeddings"] = keys[
                "rope.scaling.original_context_length"
            ]
        return None if unscaled else scaling
    if not unscaled:
        raise InputError(
            f"{keys.where}: RoPE scaling {shown(kind)} beside the divisors of rope_freqs.weight is "
            "not supported"
        )
    return _llama3(np.asarray(divisors, np.float64), base, keys.where)


def _llama3(divisors: np.ndarray, base: float, where: str) -> dict[str, Any]:
    factor = _round_float32(divisors.max())
    with np.errstate(all="ignore"):  # invalid divisors give no candidate that fits
        for low, high in _candidates(divisors, base, factor):
            candidate = _divisors(divisors.size, base, factor, low, high)
            if np.allclose(candidate, divisors, rtol=_TOLERANCE):
                return {
                    "rope_type": "llama3",
                    "original_max_position_embeddings": _CONTEXT,
                    "factor": factor,
                    "low_freq_factor": low,
                    "high_freq_factor": high,
                }
    raise InputError(
        f"{where}: the {divisors.size} divisors of rope_freqs.weight (from {divisors[0]:g} to "
        f"{divisors[-1]:g}) are no Llama 3.1 RoPE scaling; only that one is supported. Use the "
        "model's safetensors files"
    )


def _candidates(divisors: np.ndarray, base: float, factor: float) -> list[tuple[float, float]]:
    """Low and high factors: published ones, then those that the divisors allow.

    Where few frequencies are interpolated, many pairs give the same divisors; any of them will do.
    """
    published = (1.0, 4.0)
    # 1/divisor = (1 - s)/factor + s, with s = (turns - low) / (high - low): a straight line.
    smooth = (1 / divisors - 1 / factor) / (1 - 1 / factor)
    turns = _turns(divisors.size, base)  # descending, and s with them
    if not np.all(np.isfinite([turns, smooth])):
        return [published]
    interpolated = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    count = int(interpolated.sum())
    if count > 1:
        slope, offset = np.polyfit(turns[interpolated], smooth[interpolated], 1)
        low, high = -offset / slope, (1 - offset) / slope
        return [published, (_round_float32(low), _round_float32(high))]
    # The line may rise between the last frequency with s = 0 and the first with s = 1.
    max_low = turns[divisors >= factor * (1 - _TOLERANCE)].max()
    min_high = turns[divisors <= 1 + _TOLERANCE].min(initial=2 * turns.max())
    if count == 0:
        return [published, (float(max_low), float(min_high))]
    (turn,), (fraction,) = turns[interpolated], smooth[interpolated]
    slope = max(fraction / (turn - max_low), (1 - fraction) / (min_high - turn))
    return [published, (float(turn - fraction / slope), float(turn + (1 - fraction) / slope))]


def _round_float32(value: float) -> float:
    """A number with four decimals, if it is that but for the rounding of float32."""
    rounded = round(float(value), 4)
    return rounded if math.isclose(rounded, value, rel_tol=1e-5) else float(value)


def _turns(count: int, base: float) -> np.ndarray:
    """How often each frequency turns around within `_CONTEXT` positions, [count]."""
    return _CONTEXT * base ** -(np.arange(count) / count) / (2 * math.pi)


def _divisors(count: int, base: float, factor: float, low: float, high: float) -> np.ndarray:
    """What llama.cpp's converter writes for these parameters, [count]."""
    turns = _turns(count, base)
    smooth = (turns - low) / (high - low)
    interpolated = 1 / ((1 - smooth) / factor + smooth)
    return np.where(turns > high, 1.0, np.where(turns < low, factor, interpolated))
