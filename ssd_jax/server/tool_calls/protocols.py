"""What a form of tool calls provides; a further one is a file with a `CallForm`, see `forms`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tool:
    """A function that the model may call.

    Attributes:
      parameters: the JSON schema of its arguments, of an object.
      strict: whether its arguments must always follow the schema.
    """

    name: str
    parameters: Mapping[str, Any]
    strict: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Reasoning:
    """Text with which the model prepares its answer."""

    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class CallBegin:
    """The beginning of a call, with the function's name."""

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Arguments:
    """More of the JSON text of the last call's arguments."""

    text: str


Delta = Content | Reasoning | CallBegin | Arguments


class CallParser(Protocol):
    """Tells calls, and reasoning if the form has it, from other text while the text grows.

    All deltas of a text, joined, are the same however it is cut into pieces. Text is held back only
    while it may be the beginning of a call.
    """

    def push(self, text: str) -> list[Delta]:
        """What more text adds."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back at the end of the text."""
        ...


class CallForm(Protocol):
    """How models of a family write calls."""

    @property
    def name(self) -> str:
        """Its name, vLLM's where that has the form."""
        ...

    @property
    def marks(self) -> tuple[str, ...]:
        """Texts around calls, which are control tokens of some tokenizers."""
        ...

    @property
    def has_reasoning(self) -> bool:
        """Whether marks tell reasoning from content, in texts without calls, too."""
        ...

    def is_in(self, template: str) -> bool:
        """Whether a chat template asks for calls in this form."""
        ...

    def parser(self, names: frozenset[str], *, parallel: bool) -> CallParser:
        """A parser for one text.

        Args:
          names: of the functions that may be called; calls of others are no calls.
          parallel: whether there may be several calls; else what follows the first is left out.
        """
        ...

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        """The grammar of texts with calls of these tools, in llguidance's form of Lark."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True)
class CallRules:
    """What a grammar of calls depends on beside the tools.

    Attributes:
      required: whether the text is one call or several, and nothing else.
      parallel: whether there may be several calls.
      marks: ids of the form's marks that are tokens of their own.
      others: ids of all other added tokens, which texts may have; those that end a text are none.
    """

    required: bool
    parallel: bool
    marks: Mapping[str, int]
    others: Sequence[int]
