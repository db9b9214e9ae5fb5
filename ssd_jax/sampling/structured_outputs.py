"""The grammar that a request's text is held to, as callers give it."""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Iterable, Mapping
from typing import Any

from ssd_jax.errors import InputError
from ssd_jax.options.fields import check_names, check_type, immutable, with_field_help
from ssd_jax.options.other_names import Names, Unsupported, accept_names
from ssd_jax.system.files import is_unicode, parse_json, shown

MAX_GRAMMAR_CHARACTERS = 1 << 17
"""Most characters of a schema, an expression, a grammar, or all choices."""

_GUIDANCE = 'write "x-guidance": {...} into the schema, as llguidance reads it'
_OTHER_NAMES: Names = {
    "disable_fallback": Unsupported("there is one backend", (None, False)),
    "disable_any_whitespace": Unsupported(_GUIDANCE, (None, False)),
    "disable_additional_properties": Unsupported(
        'write "additionalProperties": false into the schema', (None, False)
    ),
    "whitespace_pattern": Unsupported(_GUIDANCE),
    "structural_tag": Unsupported("write it as a grammar"),
}


def _field(default: Any, text: str) -> Any:
    return dataclasses.field(default=default, metadata={"help": text})


@accept_names(_OTHER_NAMES)
@immutable
@with_field_help
@dataclasses.dataclass(frozen=True)
class StructuredOutputsParams:
    """A grammar: exactly one of the fields is given. Names and meanings are vLLM's.

    Raises:
      InputError: none or several are given, or one is of the wrong type or too long.
    """

    json: str | None = _field(None, "a JSON schema, as an object or its text")
    regex: str | None = _field(None, "a regular expression that the whole text matches")
    choice: tuple[str, ...] = _field((), "texts, one of which it is")
    grammar: str | None = _field(None, "a grammar in llguidance's form of Lark, or in GBNF")
    json_object: bool = _field(False, "any JSON object")

    def __post_init__(self) -> None:
        object.__setattr__(self, "json", _as_schema(self.json))
        object.__setattr__(self, "choice", _as_choices(self.choice))
        object.__setattr__(self, "json_object", self.json_object or False)  # None is not given
        check_type("structured_outputs.json_object", self.json_object, "bool")
        for name in ("regex", "grammar"):
            value = getattr(self, name)
            check_type(f"structured_outputs.{name}", value, "str | None")
            if value is not None and not is_unicode(value):
                raise InputError(f"structured_outputs.{name} = {shown(value)} is no Unicode text")
        names = [field.name for field in dataclasses.fields(self) if self._has(field.name)]
        if len(names) != 1:
            raise InputError(
                f"structured_outputs have {', '.join(names) or 'nothing'}; give one of json, "
                "json_object, regex, choice and grammar"
            )
        size = len("".join(self.choice) or self.json or self.regex or self.grammar or "")
        if size > MAX_GRAMMAR_CHARACTERS:
            raise InputError(
                f"structured_outputs.{self.kind} has {size} characters; at most "
                f"{MAX_GRAMMAR_CHARACTERS} are supported"
            )

    @property
    def kind(self) -> str:
        """The name of the field that is given."""
        return next(field.name for field in dataclasses.fields(self) if self._has(field.name))

    def _has(self, name: str) -> bool:
        return getattr(self, name) not in (None, (), False)


def structured_outputs_of(value: Any) -> StructuredOutputsParams | None:
    """A grammar from its fields, or from a JSON object of them as text; None stays None.

    Raises:
      InputError: it is none.
    """
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise InputError(f"structured_outputs = {shown(value)} is no JSON: {error}") from None
    if value is None or isinstance(value, StructuredOutputsParams):
        return value
    if not isinstance(value, Mapping):
        raise InputError(
            f"structured_outputs = {shown(value)} is not understood; give StructuredOutputsParams, "
            'or their fields, such as {"json_object": true}'
        )
    names = {field.name for field in dataclasses.fields(StructuredOutputsParams)}
    check_names(value, names | _OTHER_NAMES.keys(), "structured_outputs: ")
    return StructuredOutputsParams(**value)


def _as_schema(value: Any) -> str | None:
    """The text of a schema."""
    if value is None:
        return None
    try:
        schema = parse_json(value) if isinstance(value, str) else value
        if not isinstance(schema, Mapping | bool):
            raise ValueError("it is an object, or true or false")
        text = json_module.dumps(schema, ensure_ascii=False)
        parse_json(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(
            f"structured_outputs.json = {shown(value)} is no JSON schema: {error}"
        ) from None
    if not is_unicode(text):
        raise InputError(f"structured_outputs.json = {shown(value)} is no Unicode text")
    return text


def _as_choices(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    is_several = isinstance(value, Iterable) and not isinstance(value, str)
    texts: tuple[Any, ...] = tuple(value) if is_several else (value,)
    if not all(isinstance(text, str) and text and is_unicode(text) for text in texts):
        raise InputError(
            f"structured_outputs.choice = {shown(texts)}: each is a string of Unicode text that is "
            "not empty"
        )
    return texts
