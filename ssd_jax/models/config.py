"""The architecture of a decoder, read from a checkpoint's `config.json` or its GGUF equivalent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, get_args

from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

Family = Literal["llama", "qwen2", "qwen3"]
FAMILIES: tuple[Family, ...] = get_args(Family)

_COUNTS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "max_context": "max_position_embeddings",
}
"""Fields that are positive integers, and their keys in `config.json`."""

_SUPPORTED = {
    "hidden_act": ("silu", "swish", None),
    "mlp_bias": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "is_causal": (True, None),
}
_NOT_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
"""Keys of RoPE settings that do not stretch frequencies."""
_MAX_COUNT = 2**31 - 1
_MAX_FLOAT = 3e38  # near the largest float32, in which these numbers are used


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1 and later) leaves wavelengths
    below `original_context / high_freq_factor` alone, divides those above
    `original_context / low_freq_factor` by `factor`, and interpolates in between.
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192

    def to_hf(self) -> dict[str, Any]:
        """The value of `rope_scaling` in a `config.json`."""
        settings = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            settings["low_freq_factor"] = self.low_freq_factor
            settings["high_freq_factor"] = self.high_freq_factor
            settings["original_max_position_embeddings"] = self.original_context
        return settings


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder; field names follow Hugging Face where they exist there.

    `vocab_size` counts embedding rows, which may exceed the tokenizer's tokens (padding).
    `output_size` counts the rows of the output head where there are fewer (a draft with a reduced
    output vocabulary, whose checkpoint lists the ids of the rows); None means `vocab_size`.
    """

    family: Family
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None = None
    max_context: int
    tie_embeddings: bool = False
    qkv_bias: bool = False
    qk_norm: bool = False
    output_size: int | None = None

    @property
    def outputs(self) -> int:
        """Rows of the output head: the number of logits at a position."""
        return self.vocab_size if self.output_size is None else self.output_size

    @classmethod
    def from_hf(
        cls,
        config: Mapping[str, Any],
        *,
        source: str = "config.json",
        output_size: int | None = None,
    ) -> ModelConfig:
        """Reads a Hugging Face configuration (decoded JSON), which has no `output_size`.

        Raises:
          InputError: unknown architecture, missing key, or a feature that this decoder lacks.
        """
        family = config.get("model_type")
        if family not in FAMILIES:
            raise InputError(
                f"{source}: model_type {shown(family)} is not supported; supported: "
                f"{', '.join(FAMILIES)}"
            )
        try:
            return cls(family=family, output_size=output_size, **_settings(config, family, source))
        except KeyError as error:
            raise InputError(f"{source}: required key {error} is missing") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{source}: a setting has the wrong type: {error}") from None

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json`, in plain JSON values; `from_hf` reads it back."""
        scaling = self.rope_scaling
        return {
            "architectures": [f"{self.family.capitalize()}ForCausalLM"],
            "model_type": self.family,
            "hidden_act": "silu",
            **{key: getattr(self, field) for field, key in _COUNTS.items()},
            "head_dim": self.head_dim,
            "rms_norm_eps": self.rms_norm_eps,
            "rope_theta": self.rope_theta,
            "rope_scaling": None if scaling is None else scaling.to_hf(),
            "tie_word_embeddings": self.tie_embeddings,
        }


def family_switches(family: str) -> dict[str, bool]:
    """Fields of a `ModelConfig` that depend only on its family."""
    return {"qkv_bias": family == "qwen2", "qk_norm": family == "qwen3"}


def _settings(config: Mapping[str, Any], family: str, source: str) -> dict[str, Any]:
    """Fields of a `ModelConfig` of a known family."""
    if config.get("num_key_value_heads") is None:
        config = {**config, "num_key_value_heads": config["num_attention_heads"]}
    counts = {field: _count(config, key, source) for field, key in _COUNTS.items()}
    heads, kv_heads = counts["num_heads"], counts["num_kv_heads"]
    if heads % kv_heads:
        raise InputError(
            f"{source}: {heads} query heads do not divide into {kv_heads} key/value heads"
        )
    rope, scaling = _rope(config, source)
    supported = _SUPPORTED | ({} if family == "qwen2" else {"attention_bias": (False, None)})
    for key, allowed in supported.items():
        for settings in (config, rope):
            if settings.get(key) not in allowed:
                raise InputError(f"{source}: {key} = {shown(settings[key])} is not supported")
    tied = config.get("tie_word_embeddings", False)
    if not isinstance(tied, bool | None):
        raise InputError(f"{source}: tie_word_embeddings = {shown(tied)} must be true or false")
    has_head_dim = bool(config.get("head_dim"))
    head_dim = (
        _count(config, "head_dim", source) if has_head_dim else counts["hidden_size"] // heads
    )
    if head_dim < 1 or head_dim % 2:  # RoPE rotates pairs
        raise InputError(
            f"{source}: heads of {head_dim} dimensions are not supported; give an even one"
        )
    return counts | {
        "head_dim": head_dim,
        "rms_norm_eps": _positive(config, "rms_norm_eps", source),
        "rope_theta": float(_positive(rope, "rope_theta", source)),
        "rope_scaling": scaling,
        "tie_embeddings": tied is True,
        **family_switches(family),
    }


def _count(config: Mapping[str, Any], key: str, source: str) -> int:
    value = config[key]
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
        raise InputError(
            f"{source}: {key} = {shown(value)} must be a positive integer, at most {_MAX_COUNT}"
        )
    return value


def _positive(config: Mapping[str, Any], key: str, source: str) -> float:
    value = config[key]
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value <= _MAX_FLOAT:
        raise InputError(f"{source}: {key} = {shown(value)} must be a positive, finite number")
    return value


def _rope(config: Mapping[str, Any], source: str) -> tuple[dict[str, Any], RopeScaling | None]:
    """RoPE settings of the older key, the newer (with `rope_theta`) or both, and their scaling."""
    sources = [dict(config[key]) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    scalings = {_rope_scaling(settings, source) for settings in sources} or {None}
    if len(scalings) > 1:
        raise InputError(
            f"{source}: rope_scaling and rope_parameters are different scalings; keep the one that "
            "the model was trained with"
        )
    rope, scaling = {"rope_theta": config.get("rope_theta", 10000.0)}, scalings.pop()
    if len({settings.get("rope_theta", rope["rope_theta"]) for settings in sources}) > 1:
        raise InputError(
            f"{source}: rope_scaling and rope_parameters have, or default to, different values of "
            "rope_theta; keep the one that the model was trained with"
        )
    outer = config.get("original_max_position_embeddings")
    inner = scaling.original_context if scaling and scaling.kind == "llama3" else outer
    if outer not in (None, inner):
        raise InputError(
            f"{source}: original_max_position_embeddings = {shown(outer)}, and {inner} in the RoPE "
            "settings; keep the one that the model was trained with"
        )
    for settings in sources:
        rope |= settings
    return rope, scaling


def _rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    for key, value in rope.items():
        if isinstance(value, Mapping):
            raise InputError(f"{source}: RoPE of its own for {shown(key)} layers is not supported")
    kind = rope.get("rope_type") or rope.get("type")
    if kind in (None, "default"):
        surplus = [key for key in rope if key not in _NOT_SCALING and rope[key] is not None]
        if surplus:
            raise InputError(
                f"{source}: {shown(surplus[0])} stands beside rope_type {shown(kind)}, which "
                "scales nothing; give the rope_type of the scaling (linear, llama3), or drop the "
                "key"
            )
        return None
    if kind not in ("linear", "llama3"):
        raise InputError(
            f"{source}: RoPE scaling {shown(kind)} is not supported; supported: linear, llama3"
        )
    factor = float(_positive(rope, "factor", source))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    low, high = (
        float(_positive(rope, key, source)) for key in ("low_freq_factor", "high_freq_factor")
    )
    if low >= high:
        raise InputError(
            f"{source}: low_freq_factor = {low} must be below high_freq_factor, {high}"
        )
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=_count(rope, "original_max_position_embeddings", source),
    )
