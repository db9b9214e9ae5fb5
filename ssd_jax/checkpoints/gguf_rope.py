"""RoPE scaling of a GGUF file, as Hugging Face writes it in `config.json`.

llama.cpp's converter stores Llama 3.1 scaling as one divisor per frequency (`rope_freqs.weight`)
instead of the four numbers it was computed from; they are recovered here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from ssd_jax.errors import InputError

_CONTEXT = 8192  # only ratios to it matter: (low, high, context) scaled together mean the same
_TOLERANCE = 1e-4


def rope_scaling(
    metadata: Mapping[str, Any], architecture: str, divisors: np.ndarray | None, *, base: float,
    where: str,
) -> dict[str, Any] | None:  # fmt: skip
    """The `rope_scaling` entry, or None.

    Args:
      metadata: GGUF keys.
      architecture: prefix of the keys.
      divisors: `rope_freqs.weight`, [head_dim / 2], if the file has it.
      base: RoPE base.
      where: names the file in errors.

    Raises:
      InputError: divisors that no Llama 3.1 scaling gives.
    """
    if divisors is not None and np.any(divisors != 1):
        return _llama3(np.asarray(divisors, np.float64), base, where)
    kind = metadata.get(f"{architecture}.rope.scaling.type")
    factor = metadata.get(f"{architecture}.rope.scaling.factor")
    if factor is None:
        factor = metadata.get(f"{architecture}.rope.scale_linear")  # before 2023-11
    if kind is None and factor is not None:
        kind = "linear"
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0, 1)):
        return None
    return {"rope_type": kind, "factor": factor}


def _llama3(divisors: np.ndarray, base: float, where: str) -> dict[str, Any]:
    with np.errstate(all="ignore"):  # of divisors that are none; they give no candidate that fits
        for candidate in _candidates(divisors, base):
            given = (candidate[k] for k in ("factor", "low_freq_factor", "high_freq_factor"))
            if np.allclose(_divisors(divisors.size, base, *given), divisors, rtol=_TOLERANCE):
                return {
                    "rope_type": "llama3",
                    "original_max_position_embeddings": _CONTEXT,
                    **candidate,
                }
    raise InputError(
        f"{where}: the {divisors.size} divisors of rope_freqs.weight (from {divisors[0]:g} to "
        f"{divisors[-1]:g}) are no Llama 3.1 RoPE scaling; only that one is supported. Use the "
        "model's safetensors files"
    )


def _candidates(divisors: np.ndarray, base: float) -> list[dict[str, float]]:
    """Published values first, then those that the interpolated frequencies determine."""
    factor = round(float(divisors.max()), 4)
    found = [{"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}]
    between = (divisors > 1 + _TOLERANCE) & (divisors < factor * (1 - _TOLERANCE))
    turns = _turns(divisors.size, base)[between]
    if turns.size >= 2:
        # 1/divisor = (1 - s)/factor + s, with s = (turns - low) / (high - low): a straight line.
        smooth = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        if not np.all(np.isfinite([turns, smooth])):
            return found
        slope, offset = np.polyfit(turns, smooth, 1)
        low, high = -offset / slope, (1 - offset) / slope
        found.append(
            {
                "factor": factor,
                "low_freq_factor": round(float(low), 4),
                "high_freq_factor": round(float(high), 4),
            }
        )
    return found


def _turns(count: int, base: float) -> np.ndarray:
    """How often each frequency turns around within `_CONTEXT` positions, [count]."""
    return _CONTEXT * base ** -(np.arange(count) / count) / (2 * math.pi)


def _divisors(count: int, base: float, factor: float, low: float, high: float) -> np.ndarray:
    """What llama.cpp's converter writes for these parameters, [count]."""
    turns = _turns(count, base)
    smooth = (turns - low) / (high - low)
    between = 1 / ((1 - smooth) / factor + smooth)
    return np.where(turns > high, 1.0, np.where(turns < low, factor, between))
