"""How rotary frequencies are stretched, and how `config.json` says so."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

from ssd_jax.errors import InputError
from ssd_jax.models.config_reader import ConfigReader
from ssd_jax.system.files import shown

SCALINGS = ("linear", "llama3", "yarn", "longrope")
_SECTIONS = {"mrope_section", "mrope_interleaved"}
"""Keys that say which frequencies turn by the place in an image: texts turn all alike."""
_NOT_SCALING = {"rope_type", "type", "rope_theta", "partial_rotary_factor", *_SECTIONS}
"""Keys of RoPE settings that do not stretch frequencies."""
_OTHER_NAMES = {"su": "longrope", "mrope": "default"}
"""Kinds as Phi-3 and Qwen2-VL were first published, and their names since."""
_DYNAMIC = "dynamic"
"""A kind that leaves frequencies alone within the context that the model was trained on."""
_ORIGINAL = "original_max_position_embeddings"
_GROWTH = "llama_4_scaling_beta"


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
    """How rotary frequencies are stretched beyond the context that the model was trained on.

    `linear` divides every frequency by `factor`. `llama3` (Llama 3.1 and later) leaves wavelengths
    below `original_context / high_freq_factor` alone, divides those above
    `original_context / low_freq_factor` by `factor`, and interpolates in between. `yarn` does the
    same between the dimensions that turn `beta_fast` and `beta_slow` times in `original_context`.
    `longrope` divides each frequency by a number of its own: one of `short_factors`, or of
    `long_factors` in a decoder whose context is longer than `original_context`.

    Attributes:
      attention_factor: factor of rotated queries and keys.
      truncate: whether the dimensions between which `yarn` interpolates are whole numbers.
      extended_context: longest context of `longrope`.
      query_growth: b, if queries at a position p get the factor 1 + b log(1 + c) beside `yarn`,
        where c is how often `original_context` is in p.
    """

    kind: Literal["linear", "llama3", "yarn", "longrope"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_context: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    extended_context: int = 0
    query_growth: float = 0.0

    def to_hf(self) -> dict[str, Any]:
        """The value of `rope_scaling` in a `config.json`."""
        settings: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind == "llama3":
            settings["low_freq_factor"] = self.low_freq_factor
            settings["high_freq_factor"] = self.high_freq_factor
        if self.kind == "yarn":
            settings |= {
                name: getattr(self, name) for name in ("beta_fast", "beta_slow", "truncate")
            }
        if self.query_growth:
            settings[_GROWTH] = self.query_growth
        if self.kind == "longrope":
            settings["short_factor"] = [*self.short_factors]
            settings["long_factor"] = [*self.long_factors]
            settings["extended_context"] = self.extended_context
        if self.kind in ("yarn", "longrope"):
            settings["attention_factor"] = self.attention_factor
        if self.kind != "linear":
            settings[_ORIGINAL] = self.original_context
        return settings


def read_rope(config: ConfigReader) -> tuple[float, RopeScaling | None]:
    """The base of RoPE and its scaling, from the older key, the newer (with `rope_theta`) or both.

    Raises:
      InputError: the two differ, or there is a scaling that is not supported.
    """
    source = config.source
    sources = [config.part(key) for key in ("rope_scaling", "rope_parameters") if config.get(key)]
    scalings = {_read_scaling(settings, config) for settings in sources} or {None}
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
    outer = config.get(_ORIGINAL)
    inner = outer if scaling is None or scaling.kind == "linear" else scaling.original_context
    if outer not in (None, inner):
        raise InputError(
            f"{source}: {_ORIGINAL} = {shown(outer)}, and {inner} in the RoPE "
            "settings; keep the one that the model was trained with"
        )
    for settings in sources:
        rope |= settings.values
    theta = float(ConfigReader(rope, source).positive("rope_theta"))
    if _kind(rope) == _DYNAMIC and rope.get("alpha"):
        theta *= _stretch(ConfigReader(rope, source).positive("alpha"), config)
    return theta, scaling


def _kind(rope: Mapping[str, Any]) -> Any:
    kind: Any = rope.get("rope_type") or rope.get("type")
    return _OTHER_NAMES.get(kind, kind)


def _stretch(alpha: float, config: ConfigReader) -> float:
    """The factor of the base that divides the lowest frequency by `alpha`."""
    heads = config.count("num_attention_heads")
    dims = config.count("head_dim", config.count("hidden_size") // heads)
    return alpha ** (dims / (dims - 2))


def _read_scaling(rope: ConfigReader, config: ConfigReader) -> RopeScaling | None:
    """The scaling in one of the two keys; `config` has what older files keep outside them."""
    source = config.source
    for key, value in rope.values.items():
        if isinstance(value, Mapping):
            raise InputError(f"{source}: RoPE of its own for {shown(key)} layers is not supported")
    kind = _kind(rope.values)
    if rope.get(_GROWTH) and kind != "yarn":
        raise rope.unsupported(_GROWTH, rope.get(_GROWTH), "queries grow beside YaRN alone")
    if kind == _DYNAMIC:
        return None
    if kind in (None, "default"):
        surplus = [k for k, v in rope.values.items() if k not in _NOT_SCALING and v is not None]
        if surplus:
            raise InputError(
                f"{source}: {shown(surplus[0])} stands beside rope_type {shown(kind)}, which "
                f"scales nothing; give the rope_type of the scaling ({', '.join(SCALINGS)}), or "
                "drop the key"
            )
        return None
    if kind == "longrope":
        return _longrope(rope, config)
    if kind not in SCALINGS:
        raise InputError(
            f"{source}: RoPE scaling {shown(kind)} is not supported; supported: "
            f"{', '.join((*SCALINGS, _DYNAMIC))}"
        )
    factor = float(rope.positive("factor"))
    if kind == "linear":
        return RopeScaling(kind="linear", factor=factor)
    return (_llama3 if kind == "llama3" else _yarn)(rope, factor, config)


def _llama3(rope: ConfigReader, factor: float, _: ConfigReader) -> RopeScaling:
    low, high = (float(rope.positive(key)) for key in ("low_freq_factor", "high_freq_factor"))
    if low >= high:
        raise InputError(
            f"{rope.source}: low_freq_factor = {low} must be below high_freq_factor, {high}"
        )
    return RopeScaling(
        kind="llama3",
        factor=factor,
        low_freq_factor=low,
        high_freq_factor=high,
        original_context=rope.count(_ORIGINAL),
    )


def _yarn(rope: ConfigReader, factor: float, config: ConfigReader) -> RopeScaling:
    fast, slow = (float(rope.positive(*pair)) for pair in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if slow > fast:
        raise InputError(f"{rope.source}: beta_slow = {slow} must not be above beta_fast, {fast}")
    holder = rope if rope.get(_ORIGINAL) is not None else config
    key = _ORIGINAL if holder.get(_ORIGINAL) is not None else "max_position_embeddings"
    return RopeScaling(
        kind="yarn",
        factor=factor,
        beta_fast=fast,
        beta_slow=slow,
        truncate=rope.flag("truncate", default=True),
        original_context=holder.count(key),
        attention_factor=_yarn_attention_factor(rope, factor),
        query_growth=float(rope.positive(_GROWTH)) if rope.get(_GROWTH) else 0.0,
    )


def _yarn_attention_factor(rope: ConfigReader, factor: float) -> float:
    if rope.get("attention_factor") is not None:
        return float(rope.positive("attention_factor"))

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(rope.positive("mscale")) / scale(rope.positive("mscale_all_dim"))
    return scale(1.0)


def _longrope(rope: ConfigReader, config: ConfigReader) -> RopeScaling:
    holder = rope if rope.get(_ORIGINAL) is not None else config
    original = holder.count(_ORIGINAL)
    extended = rope.get("extended_context") or config.count("max_position_embeddings")
    ratio = float(rope.positive("factor", extended / original))
    attention = 1.0 if ratio <= 1 else math.sqrt(1 + math.log(ratio) / math.log(original))
    return RopeScaling(
        kind="longrope",
        factor=ratio,
        original_context=original,
        extended_context=extended,
        attention_factor=float(rope.positive("attention_factor", attention)),
        short_factors=rope.numbers("short_factor"),
        long_factors=rope.numbers("long_factor"),
    )
