"""Sampling parameters of a request, as callers give them."""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_type, immutable, with_field_help
from ssd_jax.options.other_names import accept_names
from ssd_jax.sampling.other_names import OTHER_NAMES
from ssd_jax.sampling.structured_outputs import StructuredOutputsParams, structured_outputs_of
from ssd_jax.system.files import is_unicode, shown

MAX_STOP_IDS = 32
"""Ids that end a request (EOS included); a static size of the compiled programs."""

MAX_STOPS, MAX_STOP_CHARACTERS = 64, 4096
"""Most stop strings of a request, and most characters of all: each token is compared with them.
Bad words have no more characters, either."""

MAX_BIASED_IDS = 64
"""Ids with a logit bias; also a static size of the compiled programs."""

MAX_BAD_WORDS, MAX_BAD_WORD_TOKENS = 128, 8
"""Token sequences of bad words, and tokens of each; static sizes of the compiled programs."""

MAX_BIAS = 1e6
"""Largest magnitude of a logit bias; float32 holds its sum with any logit."""

MAX_LOGPROBS = 20
"""Likeliest tokens that can be reported beside each token."""

Report = Literal["logprobs", "prompt_logprobs"]
"""What a request may ask for besides text; a field of `SamplingParams` that is None in others."""

Extra = Literal[Report, "grammar"]
"""What only some requests need programs for."""

NO_TOKEN = -1
"""Stands for a token that could not be drawn: the target's logits are no numbers, or all that may
be drawn is banned."""

_MAX_INT = 2**31 - 1


def _field(default: Any, text: str, *limits: float) -> Any:
    return dataclasses.field(default=default, metadata={"help": text, "limits": limits})


class SamplingFields(TypedDict, total=False):
    """Fields of `SamplingParams` as they may be given."""

    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: Mapping[int, float] | Iterable[tuple[int, float] | str] | None
    seed: int | None
    n: int
    max_tokens: int | None
    min_tokens: int
    stop: str | Iterable[str] | None
    stop_token_ids: Iterable[int] | None
    bad_words: str | Iterable[str] | None
    ignore_eos: bool
    include_stop_str_in_output: bool
    skip_special_tokens: bool
    logprobs: int | None
    prompt_logprobs: int | None
    structured_outputs: StructuredOutputsParams | Mapping[str, Any] | str | None


@accept_names(OTHER_NAMES)
@immutable
@with_field_help
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How one request is sampled and when it ends.

    Raises:
      InputError: a value out of its range, named with the range.
    """

    temperature: float = _field(0.0, "0 is greedy")
    top_p: float = _field(
        1.0, "smallest set of likeliest tokens with this mass; 1 is off", 1e-6, 1.0
    )
    top_k: int = _field(0, "likeliest tokens kept; 0 or -1 is off", 0, _MAX_INT)
    min_p: float = _field(0.0, "drop tokens below this share of the likeliest; 0 is off", 0.0, 1.0)
    repetition_penalty: float = _field(
        1.0, "divides logits of tokens in prompt or output; 1 is off", 1e-6, 1e6
    )
    frequency_penalty: float = _field(
        0.0, "subtracted for each time a token was generated", -1e6, 1e6
    )
    presence_penalty: float = _field(0.0, "subtracted once if a token was generated", -1e6, 1e6)
    logit_bias: tuple[tuple[int, float], ...] = _field(
        (), "added to the logits of token ids, as id:bias"
    )
    seed: int | None = _field(
        0,
        "64-bit sampling seed; a request that repeats it gets the same text, or, if the draft's "
        "speed decides proposal lengths, other draws from the same distribution; none: a new one "
        "for each request",
        0,
        2**64 - 1,
    )
    n: int = _field(1, "texts of each prompt, with noise of their own", 1, _MAX_INT)
    max_tokens: int | None = _field(
        256, "max tokens generated; none: to the end of the context", 1, _MAX_INT
    )
    min_tokens: int = _field(0, "no stop before this many generated tokens")
    stop: tuple[str, ...] = _field((), "strings that end the text")
    stop_token_ids: tuple[int, ...] = _field((), "token ids that end the text besides EOS")
    bad_words: tuple[str, ...] = _field((), "words that may not be generated")
    ignore_eos: bool = _field(False, "continue past end-of-sequence tokens")
    include_stop_str_in_output: bool = _field(False, "end the text with its stop, not before it")
    skip_special_tokens: bool = _field(True, "leave special tokens out of the text")
    logprobs: int | None = _field(
        None,
        f"report logprobs of each token and of this many likeliest, 0 to {MAX_LOGPROBS}; "
        "default: none",
        0,
        MAX_LOGPROBS,
    )
    prompt_logprobs: int | None = _field(
        None,
        f"report logprobs of each prompt token and of this many likeliest, 0 to {MAX_LOGPROBS}; "
        "default: none",
        0,
        MAX_LOGPROBS,
    )

    structured_outputs: StructuredOutputsParams | None = _field(  # noqa: RUF009
        None,
        "hold the text to a grammar, as JSON text with one of json (a schema), json_object, regex, "
        "choice and grammar; default: none",
    )

    if TYPE_CHECKING:

        def __init__(self, **_fields: Unpack[SamplingFields]) -> None: ...

    def __post_init__(self) -> None:
        if isinstance(self.top_k, Integral) and self.top_k == -1:
            object.__setattr__(self, "top_k", 0)
        readers = {
            "stop": functools.partial(_as_texts, "stop"),
            "stop_token_ids": _as_ids,
            "bad_words": functools.partial(_as_texts, "bad_words", limit=MAX_BAD_WORDS),
            "logit_bias": _as_bias,
        }
        for name, read in readers.items():
            value = getattr(self, name)
            object.__setattr__(self, name, () if value is None else read(value))
        grammar = structured_outputs_of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", grammar)
        for field in dataclasses.fields(self):
            value, limits = getattr(self, field.name), field.metadata["limits"]
            check_type(field.name, value, str(field.type))
            if limits and value is not None:
                _check(field.name, value, *limits)
            kind = _PLAIN_TYPES.get(str(field.type).removesuffix(" | None"))
            if kind is not None and value is not None:  # NumPy's, or a fraction, until here
                try:
                    object.__setattr__(self, field.name, kind(value))
                except OverflowError:
                    raise InputError(f"{field.name} is larger than any float") from None
        if self.temperature != 0:
            _check("temperature", self.temperature, 1e-6, 1e6, alternative="0 (greedy) or ")
        _check("min_tokens", self.min_tokens, 0, self.most_tokens)
        if self.structured_outputs is not None and self.ignore_eos:
            raise InputError(
                "ignore_eos and structured_outputs exclude each other: a text ends where its "
                "grammar does; leave one out"
            )

    @property
    def most_tokens(self) -> int:
        """`max_tokens`, or more than any context where it is None."""
        return _MAX_INT if self.max_tokens is None else self.max_tokens

    @property
    def seed_of_request(self) -> int:
        """`seed` in a `Request`, which has drawn one where it was None."""
        assert self.seed is not None
        return self.seed

    @property
    def reports(self) -> frozenset[Report]:
        """What it asks for besides text."""
        reports: set[Report] = set()
        if self.logprobs is not None:
            reports.add("logprobs")
        if self.prompt_logprobs is not None:
            reports.add("prompt_logprobs")
        return frozenset(reports)

    @property
    def extras(self) -> frozenset[Extra]:
        """What it needs programs for that most requests do not need."""
        extras: set[Extra] = {*self.reports}
        if self.structured_outputs is not None:
            extras.add("grammar")
        return frozenset(extras)


def _as_bias(bias: Any) -> tuple[tuple[int, float], ...]:
    """(id, bias) pairs from a mapping, pairs, or "id:bias" texts."""
    items = bias.items() if isinstance(bias, Mapping) else [bias] if type(bias) is str else bias
    try:
        split = [item.split(":") if isinstance(item, str) else item for item in items]
        pairs = tuple(
            (int(token) if isinstance(token, str) else _as_id(token), float(value))
            for token, value in split
        )
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"logit_bias = {_one_line(bias)} is not understood; give id:bias, such as 42:-5.5"
        ) from None
    if len(pairs) > MAX_BIASED_IDS:
        raise InputError(f"logit_bias has {len(pairs)} ids; at most {MAX_BIASED_IDS} are supported")
    if len({token for token, _ in pairs}) < len(pairs):
        raise InputError(f"logit_bias = {_one_line(bias)} names an id twice")
    if not all(abs(value) <= MAX_BIAS for _, value in pairs):  # NaN is none either
        raise InputError(
            f"logit_bias = {_one_line(bias)} must be from -{MAX_BIAS:g} to {MAX_BIAS:g}; "
            "-100 makes a token unlikely"
        )
    return pairs


def _as_texts(name: str, value: Any, limit: int = MAX_STOPS) -> tuple[str, ...]:
    is_collection = isinstance(value, Iterable) and not isinstance(value, str)
    try:
        texts: tuple[Any, ...] = tuple(value) if is_collection else (value,)
    except TypeError:  # an array without axes
        texts = (value,)
    if not all(isinstance(text, str) and text and is_unicode(text) for text in texts):
        singular = name.removesuffix("s").replace("_", " ")
        raise InputError(
            f"{name} = {_one_line(texts)}: each {singular} is a string of Unicode text that is "
            "not empty"
        )
    length = sum(map(len, texts))
    if len(texts) > limit or length > MAX_STOP_CHARACTERS:
        raise InputError(
            f"{name} has {len(texts)} strings of {length} characters; give at most {limit} of "
            f"{MAX_STOP_CHARACTERS} together"
        )
    return texts


def _one_line(values: Any) -> str:
    """A value as one short line; several texts, as flags give them, one after the other."""
    if isinstance(values, list | tuple) and values and all(isinstance(v, str) for v in values):
        return ", ".join(map(shown, values[:4])) + ", ..." * (len(values) > 4)
    return shown(values)


def _as_ids(ids: Any) -> tuple[int, ...]:
    try:
        return tuple(_as_id(token) for token in ids)
    except TypeError:
        raise InputError(f"stop_token_ids = {ids!r}: token ids are integers") from None


def _as_id(token: Any) -> int:
    if isinstance(token, bool):
        raise TypeError(token)
    return operator.index(token)


def _check(name: str, value: float, low: float, high: float, *, alternative: str = "") -> None:
    if not low <= value <= high:
        raise InputError(
            f"{name} = {value} is out of range; give {alternative}a value from {low} to {high}"
        )


_PLAIN_TYPES = {"int": int, "float": float}
