"""Reads values of a `config.json`, with errors that name the key and the file."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

_MAX_COUNT = 2**31 - 1
_MAX_FLOAT = 3e38  # near the largest float32, in which these numbers are used

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("silu", "swish", None),
    "hidden_activation": (None,),
    "attention_bias": (False, None),
    "attention_out_bias": (False, None),
    "mlp_bias": (False, None),
    "use_bidirectional_attention": (False, None),
    "use_sliding_window": (False, None),
    "partial_rotary_factor": (1, None),
    "is_causal": (True, None),
    "use_qk_norm": (False, None),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, None),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
}
"""Keys that change numbers, and values with which they do not."""


class ConfigReader:
    """The settings of one `config.json`, or of one of its parts.

    Remembers the keys that were read: those of `_NEUTRAL` that were not must be neutral.

    Args:
      values: decoded JSON.
      source: names the file in errors.
    """

    def __init__(self, values: Mapping[str, Any], source: str) -> None:
        self.values, self.source = values, source
        self._read: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """A value as it is; the default if it is missing."""
        self._read.add(key)
        return self.values.get(key, default)

    def part(self, key: str) -> ConfigReader:
        """A mapping within this one."""
        return ConfigReader(dict(self.get(key)), self.source)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive integer; the default stands for a missing one, or null."""
        value = self._value(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= _MAX_COUNT:
            raise InputError(
                f"{self.source}: {key} = {shown(value)} must be a positive integer, at most "
                f"{_MAX_COUNT}"
            )
        return value

    def positive(self, key: str, default: float | None = None) -> float:
        """A positive, finite number; the default stands for a missing one, or null."""
        value = self._value(key, default)
        if not _is_positive(value):
            raise InputError(
                f"{self.source}: {key} = {shown(value)} must be a positive, finite number"
            )
        return value

    def numbers(self, key: str) -> tuple[float, ...]:
        """A list of positive, finite numbers."""
        values = self._value(key)
        if not isinstance(values, list) or not all(map(_is_positive, values)):
            raise InputError(
                f"{self.source}: {key} = {shown(values)} must be a list of positive, finite numbers"
            )
        return tuple(map(float, values))

    def flag(self, key: str, *, default: bool = False) -> bool:
        """True or false; the default stands for a missing one, or null."""
        value = self._value(key, default)
        if not isinstance(value, bool):
            raise InputError(f"{self.source}: {key} = {shown(value)} must be true or false")
        return value

    def unsupported(self, key: str, value: Any, why: str = "") -> InputError:
        """The error about a value that this decoder has no mechanism for."""
        return InputError(
            f"{self.source}: {key} = {shown(value)} is not supported{why and f': {why}'}"
        )

    def require_neutral(self) -> None:
        """Refuses values that would change numbers and that nobody has read.

        Raises:
          InputError: there is one.
        """
        parts = [self.values[key] for key in ("rope_scaling", "rope_parameters") if self.get(key)]
        for key, allowed in _NEUTRAL.items():
            if key in self._read:
                continue
            for settings in (self.values, *parts):
                if settings.get(key) not in allowed:
                    raise self.unsupported(key, settings[key])
        kinds = {*(self.values.get("layer_types") or ())} - {"full_attention"}
        if kinds and "layer_types" not in self._read:
            raise self.unsupported("layer_types", sorted(kinds)[0])

    def _value(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        if default is not None and self.values.get(key) is None:
            return default
        return self.values[key]


def _is_positive(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and 0 < value <= _MAX_FLOAT
