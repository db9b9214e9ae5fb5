"""How a request is sampled, as its callers say it."""

from __future__ import annotations

import dataclasses
import math
import numbers
import operator
from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.system.files import shown

MAX_STOP_IDS = 32
"""Ids that end a request (EOS included); a static size of the compiled programs."""

MAX_STOPS, MAX_STOP_CHARACTERS = 64, 4096
"""Stop strings of a request, and their characters together: each token is compared with them."""

MAX_BIASED_IDS = 64
"""Ids with a logit bias; a static size likewise."""

MAX_LOGPROBS = 20
"""Likeliest tokens that can be reported beside each token."""


def _help(text: str) -> dict[str, Any]:
    return {"help": text}


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Raises:
      InputError: a value out of its range, named with the range.
    """

    temperature: float = dataclasses.field(default=0.0, metadata=_help("0 is greedy"))
    top_p: float = dataclasses.field(
        default=1.0, metadata=_help("smallest set of likeliest tokens with this mass; 1 is off")
    )
    top_k: int = dataclasses.field(default=0, metadata=_help("likeliest tokens kept; 0 is off"))
    min_p: float = dataclasses.field(
        default=0.0, metadata=_help("drop tokens below this share of the likeliest; 0 is off")
    )
    repetition_penalty: float = dataclasses.field(
        default=1.0, metadata=_help("divides logits of tokens in prompt or output; 1 is off")
    )
    frequency_penalty: float = dataclasses.field(
        default=0.0, metadata=_help("subtracted for each time a token was generated")
    )
    presence_penalty: float = dataclasses.field(
        default=0.0, metadata=_help("subtracted once if a token was generated")
    )
    logit_bias: tuple[tuple[int, float], ...] = dataclasses.field(
        default=(), metadata=_help("added to the logits of token ids, as id:bias")
    )
    seed: int = dataclasses.field(
        default=0,
        metadata=_help(
            "64-bit seed of every draw; a request that repeats it gets the same text, or "
            "where the draft's speed decides how long proposals are, other draws of the same law"
        ),
    )
    max_tokens: int = dataclasses.field(default=256, metadata=_help("most tokens generated"))
    min_tokens: int = dataclasses.field(
        default=0, metadata=_help("no stop before this many generated tokens")
    )
    stop: tuple[str, ...] = dataclasses.field(
        default=(), metadata=_help("strings that end the text")
    )
    stop_token_ids: tuple[int, ...] = dataclasses.field(
        default=(), metadata=_help("token ids that end the text, beside EOS")
    )
    ignore_eos: bool = dataclasses.field(
        default=False, metadata=_help("generate through end-of-sequence tokens")
    )
    logprobs: int | None = dataclasses.field(
        default=None,
        metadata=_help(
            f"report each token's log-probability and this many likeliest, 0 to {MAX_LOGPROBS}; "
            "default: none"
        ),
    )

    def __post_init__(self) -> None:
        object.__setattr__(self, "stop", _as_tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_ids(self.stop_token_ids))
        object.__setattr__(self, "logit_bias", _as_bias(self.logit_bias))
        check_types(self)
        if self.temperature != 0:
            _check("temperature", self.temperature, 1e-6, 1e6, also="0 (greedy) or ")
        _check("top_p", self.top_p, 1e-6, 1.0)
        _check("min_p", self.min_p, 0.0, 1.0)
        _check("top_k", self.top_k, 0, 2**31 - 1)
        _check("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _check("frequency_penalty", self.frequency_penalty, -1e6, 1e6)
        _check("presence_penalty", self.presence_penalty, -1e6, 1e6)
        _check("seed", self.seed, 0, 2**64 - 1)
        _check("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check("min_tokens", self.min_tokens, 0, self.max_tokens)
        if self.logprobs is not None:
            _check("logprobs", self.logprobs, 0, MAX_LOGPROBS)


def _as_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs from a mapping, pairs, or "id:bias" texts."""
    items = bias.items() if isinstance(bias, Mapping) else bias
    try:
        split = [item.split(":") if isinstance(item, str) else item for item in items]
        pairs = tuple((int(token), float(value)) for token, value in split)
    except (TypeError, ValueError):
        raise InputError(
            f"logit_bias = {bias!r} is not understood; give id:bias, such as 42:-5.5"
        ) from None
    if len(pairs) > MAX_BIASED_IDS:
        raise InputError(f"logit_bias has {len(pairs)} ids; at most {MAX_BIASED_IDS} are supported")
    if len({token for token, _ in pairs}) < len(pairs):
        raise InputError(f"logit_bias = {bias!r} names an id twice")
    if not all(math.isfinite(value) for _, value in pairs):
        raise InputError(f"logit_bias = {bias!r} must be finite; use -100 to make a token unlikely")
    return pairs


def _as_tuple(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if not all(isinstance(text, str) and text for text in stops):
        raise InputError(f"stop = {shown(stops)}: each stop is a string that is not empty")
    length = sum(map(len, stops))
    if len(stops) > MAX_STOPS or length > MAX_STOP_CHARACTERS:
        raise InputError(
            f"stop has {len(stops)} strings of {length} characters; give at most {MAX_STOPS} of "
            f"{MAX_STOP_CHARACTERS} together"
        )
    return stops


def _as_ids(ids: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(operator.index(token) for token in ids)
    except TypeError:
        raise InputError(f"stop_token_ids = {ids!r}: token ids are integers") from None


def _check(name: str, value: float, low: float, high: float, *, also: str = "") -> None:
    if not low <= value <= high:
        raise InputError(
            f"{name} = {value} is out of range; give {also}a value from {low} to {high}"
        )


_ACCEPTED = {"bool": bool, "int": numbers.Integral, "float": numbers.Real, "str": str}


def check_types(settings: Any) -> None:
    """Refuses values of the wrong type in a dataclass of settings.

    Raises:
      InputError: the field, its value and the type it takes.
    """
    for field in dataclasses.fields(settings):
        kind, _, optional = str(field.type).partition(" | ")
        value = getattr(settings, field.name)
        if kind not in _ACCEPTED or (optional == "None" and value is None):
            continue
        mixed_up = isinstance(value, bool) != (kind == "bool")
        if mixed_up or not isinstance(value, _ACCEPTED[kind]):
            raise InputError(f"{field.name} = {value!r} must be of type {kind}")
