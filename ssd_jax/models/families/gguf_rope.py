"""Scaling of RoPE in GGUF files.

llama.cpp's converter stores Llama 3.1 scaling as one divisor per frequency (`rope_freqs.weight`)
instead of the four numbers it was computed from; they are recovered here.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ssd_jax.errors import InputError
from ssd_jax.models.families.gguf_keys import GgufKeys
from ssd_jax.system.files import shown

FREQUENCIES = "rope_freqs.weight"
LONG, SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
"""Tensors with divisors of frequencies: of Llama 3.1 scaling, and of `longrope`."""

_CONTEXT = 8192  # only ratios to it matter: (low, high, context) can be scaled together
_TOLERANCE = 1e-4


def rope_base(keys: GgufKeys) -> float:
    """The base of the frequencies."""
    return keys.number("rope.freq_base", 10000.0)


def rope_scaling(keys: GgufKeys) -> dict[str, Any] | None:
    """RoPE scaling as in Hugging Face's `config.json`, or None.

    Raises:
      InputError: divisors that no supported scaling has.
    """
    kind = keys.get("rope.scaling.type")
    factor = keys.get("rope.scaling.factor", keys.get("rope.scale_linear"))  # before 2023-11
    if kind is None and factor is not None:
        kind = "linear"
    unscaled = kind in (None, "none") or (kind == "linear" and factor in (None, 0, 1))
    divisors = keys.divisors.get(FREQUENCIES)
    if divisors is not None and not np.all(divisors == 1):
        if not unscaled:
            raise InputError(
                f"{keys.where}: RoPE scaling {shown(kind)} beside the divisors of {FREQUENCIES} is "
                "not supported"
            )
        return _llama3(np.asarray(divisors, np.float64), rope_base(keys), keys.where)
    if unscaled:
        return None
    scaling = {"rope_type": kind, "factor": factor}
    return scaling | _yarn(keys) if kind == "yarn" else scaling


def _yarn(keys: GgufKeys) -> dict[str, Any]:
    names = {"beta_fast": "beta_fast", "beta_slow": "beta_slow", "attn_factor": "attention_factor"}
    settings: dict[str, Any] = {
        name: keys.number(f"rope.scaling.yarn_{key}")
        for key, name in names.items()
        if keys.get(f"rope.scaling.yarn_{key}") is not None
    }
    original = keys["rope.scaling.original_context_length"]
    return settings | {"original_max_position_embeddings": original}


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
