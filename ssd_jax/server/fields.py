"""The fields of requests: which there are, which are supported, and what they ask of the engine."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Container, Iterator, Mapping
from typing import Annotated, Any, Literal, get_type_hints

from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    ValidationError,
    create_model,
)
from typing_extensions import override

from ssd_jax.errors import InputError
from ssd_jax.sampling.params import MAX_BIASED_IDS, SamplingParams
from ssd_jax.server.errors import ApiError, invalid, of_input, of_validation
from ssd_jax.server.response_formats import asked_grammar
from ssd_jax.system.files import nearest, shown


class _FirstFault(FailFast):
    """Marks lists of which the first wrong item is reported, and not each of a million."""

    @override
    def __hash__(self) -> int:  # unions need one
        return hash(type(self))


_TEXTS = Annotated[list[str], _FirstFault()]
_IDS = Annotated[list[int], _FirstFault()]
_OBJECTS = Annotated[list[dict[str, Any]], _FirstFault()]


def _require_few(bias: Any) -> Any:
    if isinstance(bias, dict) and len(bias) > MAX_BIASED_IDS:
        raise ValueError(f"{len(bias)} ids; at most {MAX_BIASED_IDS} are supported")
    return bias


_SAMPLING: dict[str, Any] = {
    "frequency_penalty": float,
    "ignore_eos": bool,
    "include_stop_str_in_output": bool,
    "logit_bias": Annotated[dict[str, float], BeforeValidator(_require_few)],
    "bad_words": _TEXTS,
    "min_p": float,
    "min_tokens": int,
    "presence_penalty": float,
    "repetition_penalty": float,
    "skip_special_tokens": bool,
    "stop": str | _TEXTS,
    "stop_token_ids": _IDS,
    "structured_outputs": dict[str, Any],
    "temperature": float,
    "top_k": int,
    "top_p": float,
}
"""Fields that are settings of `SamplingParams`, OpenAI's and vLLM's."""

_COMMON: dict[str, Any] = {
    **_SAMPLING,
    "grammar": str,
    "k": int,
    "model": str,
    "max_tokens": int,
    "n": int,
    "priority": int,
    "response_format": dict[str, Any],
    "return_token_ids": bool,
    "seed": int,
    "speculation": Literal["off", "sd", "ssd", "auto"],
    "stream": bool,
    "timeout": float,
    "user": str,
}
_CHAT: dict[str, Any] = {
    **_COMMON,
    "add_generation_prompt": bool,
    "chat_template_kwargs": dict[str, Any],
    "continue_final_message": bool,
    "logprobs": bool,
    "max_completion_tokens": int,
    "messages": _OBJECTS,
    "parallel_tool_calls": bool,
    "tool_choice": str | dict[str, Any],
    "tools": _OBJECTS,
    "top_logprobs": int,
}
TEMPLATE_FIELDS = (
    *("add_generation_prompt", "chat_template_kwargs", "continue_final_message"),
    "tools",
)
"""Fields of messages, which say how the chat template writes them."""

_COMPLETION: dict[str, Any] = {
    **_COMMON,
    "echo": bool,
    "logprobs": int,
    "prompt": str | _TEXTS | _IDS | Annotated[list[_IDS], _FirstFault()],
}
_AS_OPENAI = ("stream_options",)
"""Fields whose types are those of the `openai` package; others of its types have limits of its own
service, or can be read once only."""

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "metadata": ({},),
    "modalities": (["text"],),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "suffix": ("",),
}
"""Fields that are not supported, with the values that ask for nothing."""

COMPLETION_TOKENS = 16
"""Default of `max_tokens` of a completion, as OpenAI has it."""

_CONFIG = ConfigDict(extra="forbid", strict=True)


@dataclasses.dataclass(frozen=True)
class Form:
    """What requests to one path may have.

    Attributes:
      model: checks the supported fields.
      unsupported: OpenAI's other fields.
      names: of fields by names in the engine's messages.
    """

    model: type[BaseModel]
    unsupported: frozenset[str]
    names: Mapping[str, str]

    def read(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """The fields that are given; null is as none.

        Raises:
          ApiError: one that is unknown, not supported or of the wrong type.
        """
        values: dict[str, Any] = {}
        for name, value in body.items():
            if name in self.unsupported:
                if value is not None and value not in _NEUTRAL.get(name, ()):
                    raise invalid(
                        f"{shown(name)} is not supported; leave it out",
                        name,
                        "unsupported_parameter",
                    )
            elif name not in self.model.model_fields:
                near = nearest(name, self.model.model_fields)
                hint = f"did you mean {near!r}?" if near else "leave it out"
                raise invalid(
                    f"{shown(name)}: there is no such field; {hint}", name, "unknown_parameter"
                )
            elif value is not None:
                values[name] = value
        try:
            read = self.model.model_validate(values)
        except ValidationError as error:
            raise of_validation(error) from None
        fields = {name: getattr(read, name) for name in read.model_fields_set}
        if "stream_options" in fields:
            _check_stream_options(fields)
        return fields

    def params(
        self, fields: Mapping[str, Any], defaults: SamplingParams, **more: Any
    ) -> SamplingParams:
        """The sampling parameters of a request.

        Args:
          more: settings of `SamplingParams` that are not fields of the same names.

        Raises:
          ApiError: values out of range.
        """
        settings = {name: fields[name] for name in _SAMPLING if name in fields}
        if "seed" in fields:
            settings["seed"] = _unsigned(fields["seed"])
        settings |= asked_grammar(fields)
        settings |= more
        with self.refusing(fields):
            return dataclasses.replace(defaults, **settings)

    @contextlib.contextmanager
    def refusing(self, fields: Mapping[str, Any]) -> Iterator[None]:
        """A context in which what the engine refuses becomes an `ApiError` that names the field."""
        try:
            yield
        except InputError as error:
            raise self._refusal(error, fields) from None

    def _refusal(self, error: InputError, fields: Mapping[str, Any]) -> ApiError:
        names = {name: name for name in self.model.model_fields} | dict(self.names)
        if "max_completion_tokens" in fields:
            names["max_tokens"] = "max_completion_tokens"
        for field in ("tools", "grammar", "response_format"):
            if field in fields:
                names["structured_outputs"] = field
        return of_input(error, names)


def _form(name: str, openai_fields: type, other_fields: dict[str, Any], **names: str) -> Form:
    hints = get_type_hints(openai_fields)
    types = {field: hints[field] for field in _AS_OPENAI} | other_fields
    model = _model(name, types, ("messages", "prompt"))
    return Form(model, frozenset(hints) - frozenset(types), names)


def _model(name: str, types: dict[str, Any], required: Container[str] = ()) -> type[BaseModel]:
    fields: dict[str, Any] = {
        field: (kind, ...) if field in required else (kind | None, Field(default=None))
        for field, kind in types.items()
    }
    return create_model(name, __config__=_CONFIG, **fields)


CHAT = _form(
    "ChatRequest",
    chat_params.CompletionCreateParamsBase,
    _CHAT,
    prompt="messages",
    logprobs="top_logprobs",
    chat="messages",
)
COMPLETION = _form(
    "CompletionRequest",
    completion_params.CompletionCreateParamsBase,
    _COMPLETION,
    prompt_logprobs="logprobs",
    token="prompt",
    text="prompt",
)
TOKENIZE = Form(
    _model(
        "TokenizeRequest",
        {
            "model": str,
            "prompt": str,
            "add_special_tokens": bool,
            **{name: _CHAT[name] for name in ("messages", *TEMPLATE_FIELDS)},
        },
    ),
    frozenset(),
    {"text": "prompt", "chat": "messages"},
)
DETOKENIZE = Form(
    _model("DetokenizeRequest", {"model": str, "tokens": _IDS}, ("tokens",)), frozenset(), {}
)


def _check_stream_options(fields: dict[str, Any]) -> None:
    if not fields.get("stream"):
        raise invalid(
            "stream_options is for streams; give stream = true, or leave it out", "stream_options"
        )
    if fields["stream_options"].get("include_obfuscation"):
        raise invalid(
            "stream_options.include_obfuscation is not supported; leave it out",
            "stream_options.include_obfuscation",
            "unsupported_parameter",
        )


def _unsigned(seed: int) -> int:
    """A seed of 64 bits; OpenAI's have a sign, whose bit counts as 2^63."""
    return seed + 2**64 if -(2**63) <= seed < 0 else seed


def includes_usage(fields: Mapping[str, Any]) -> bool:
    """Whether a stream ends with its usage."""
    return bool(fields.get("stream_options", {}).get("include_usage"))
