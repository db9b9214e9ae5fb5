"""The architecture of a decoder, read from a checkpoint's `config.json` or its GGUF equivalent."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.models.families.registry import SWITCHES, family_of
from ssd_jax.models.mechanisms import PLAIN, Mechanisms
from ssd_jax.models.rope_scaling import RopeScaling, read_rope

KEY = "ssd_jax_decoder"
"""Key of a `config.json` written by `to_hf` that has what the usual keys do not say."""

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

_MECHANISMS = {field.name for field in dataclasses.fields(Mechanisms)}
_SWITCHED = ("qkv_bias", "qk_norm")


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Architecture of one decoder; field names follow Hugging Face where they exist there.

    `vocab_size` counts embedding rows, which may exceed the tokenizer's tokens (padding).
    `output_size` counts the rows of the output head where there are fewer (a draft with a reduced
    output vocabulary, whose checkpoint lists the ids of the rows); None means `vocab_size`.
    `family` is a `model_type`; what a decoder computes is in the other fields alone.
    """

    family: str
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
    mechanisms: Mechanisms = PLAIN
    output_size: int | None = None

    @property
    def channels(self) -> tuple[int, ...]:
        """The numbers of channels of feed-forwards that see every token."""
        experts = self.mechanisms.experts
        if experts is None:
            return (self.intermediate_size,)
        dense = self.intermediate_size if experts.dense_layers else 0
        return tuple(size for size in (experts.shared, dense) if size)

    @property
    def outputs(self) -> int:
        """Rows of the output head: the number of logits at a position."""
        return self.vocab_size if self.output_size is None else self.output_size

    def of_layers(self, layers: Sequence[int]) -> ModelConfig:
        """That of a decoder that consists of these layers."""
        mechanisms = self.mechanisms.of_layers(layers)
        return dataclasses.replace(self, num_layers=len(layers), mechanisms=mechanisms)

    def for_context(self, context: int | None) -> ModelConfig:
        """That of a decoder for texts of this length; None is what it was trained on.

        Only `longrope` makes a difference: it rotates by other frequencies beyond that.
        """
        scaling = self.rope_scaling
        if scaling is None or scaling.kind != "longrope":
            return self
        longer = context is not None and context > scaling.original_context
        limit = scaling.extended_context if longer else scaling.original_context
        return dataclasses.replace(self, max_context=limit)

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
        family = family_of(config.get("model_type"), source)
        try:
            stored = config.get(KEY)
            reader = ConfigReader(config, source) if stored else family.reader(config, source)
            fields = _common(reader)
            special = _special(stored) if stored else dict(family.read(reader))
            reader.require_neutral()
            mechanisms = Mechanisms(**{k: v for k, v in special.items() if k in _MECHANISMS})
            others = {name: value for name, value in special.items() if name not in _MECHANISMS}
            parsed = cls(
                family=family.name,
                output_size=output_size,
                mechanisms=mechanisms,
                **(fields | others),
            )
        except KeyError as error:
            raise InputError(f"{source}: required key {error} is missing") from None
        except (TypeError, ValueError, ArithmeticError) as error:
            raise InputError(f"{source}: a setting has the wrong type: {error}") from None
        _check(parsed, source)
        return parsed.for_context(None)

    def to_hf(self) -> dict[str, Any]:
        """The content of a `config.json`, in plain JSON values; `from_hf` reads it back."""
        scaling = self.rope_scaling
        if self != self.for_context(None):
            return self.for_context(None).to_hf()
        written = {
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
        usual = {name: SWITCHES.get(self.family, {}).get(name, False) for name in _SWITCHED}
        switches = {name: getattr(self, name) for name in _SWITCHED}
        if self.family in SWITCHES and (switches, self.mechanisms) == (usual, PLAIN):
            return written
        return written | {KEY: switches | self.mechanisms.to_json()}


def family_switches(family: str) -> dict[str, Any]:
    """Fields of a `ModelConfig` that depend only on its family, one of `SWITCHES`."""
    return dict.fromkeys(_SWITCHED, False) | {"mechanisms": PLAIN} | SWITCHES[family]


def _check(config: ModelConfig, source: str) -> None:
    """Refuses what cannot be computed.

    Raises:
      InputError: see there.
    """
    m, scaling = config.mechanisms, config.rope_scaling
    if scaling is not None and scaling.kind == "longrope":
        pairs = (m.rotary_dim or config.head_dim) // 2
        counts = len(scaling.short_factors), len(scaling.long_factors)
        if counts != (pairs, pairs):
            raise InputError(
                f"{source}: short_factor and long_factor have {counts[0]} and {counts[1]} numbers; "
                f"heads rotate {pairs} pairs of dimensions"
            )
    if m.activation == "xielu" and m.gated:
        raise InputError(f"{source}: activation xielu beside gates is not supported")
    if m.joint_qk_norm and (m.head_qk_norm or m.late_qk_norm):
        raise InputError(f"{source}: joint_qk_norm beside other norms of heads is not supported")
    experts = m.experts
    if experts is None:
        return
    if experts.chosen > experts.count:
        raise InputError(f"{source}: a token has {experts.chosen} of {experts.count} experts")
    if not m.gated or experts.of_layers(range(config.num_layers)) is None:
        raise InputError(f"{source}: experts without gates, or in no layer, are not supported")


def _special(stored: Mapping[str, Any]) -> dict[str, Any]:
    """What `to_hf` has written under `KEY`."""
    switches = {name: bool(stored[name]) for name in _SWITCHED}
    rest = {name: value for name, value in stored.items() if name not in _SWITCHED}
    mechanisms = Mechanisms.from_json(rest)
    return switches | {name: getattr(mechanisms, name) for name in _MECHANISMS}


def _common(config: ConfigReader) -> dict[str, Any]:
    """Fields of a `ModelConfig` that every family has."""
    heads = config.count("num_attention_heads")
    counts = {field: config.count(key, _default(key, heads)) for field, key in _COUNTS.items()}
    kv_heads = counts["num_kv_heads"]
    if heads % kv_heads:
        raise InputError(
            f"{config.source}: {heads} query heads do not divide into {kv_heads} key/value heads"
        )
    theta, scaling = read_rope(config)
    if config.get("head_dim"):
        head_dim = config.count("head_dim")
    else:
        head_dim = counts["hidden_size"] // heads
    if head_dim < 1 or head_dim % 2:  # RoPE rotates pairs
        raise InputError(
            f"{config.source}: heads of {head_dim} dimensions are not supported; give an even one"
        )
    if scaling is not None and scaling.kind == "yarn":
        extended = int(scaling.original_context * scaling.factor)
        counts["max_context"] = max(counts["max_context"], extended)
    return counts | {
        "head_dim": head_dim,
        "rms_norm_eps": config.positive("rms_norm_eps"),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_embeddings": config.flag("tie_word_embeddings"),
    }


def _default(key: str, heads: int) -> int | None:
    return heads if key == "num_key_value_heads" else None
