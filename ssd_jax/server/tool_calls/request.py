"""What a request says of tool calls."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.server.errors import ApiError, invalid
from ssd_jax.server.tool_calls.forms import NAMES, form_of
from ssd_jax.server.tool_calls.protocols import CallForm, CallParser, CallRules, Tool
from ssd_jax.system.files import shown

MAX_TOOLS = 128
"""Most functions of a request, as OpenAI has it."""

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FUNCTION_FIELDS = frozenset({"name", "description", "parameters", "strict"})
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}
_UNKNOWN = "unknown_parameter"
_GRAMMARS = ("grammar", "response_format", "structured_outputs")
_ONE_CALL = re.compile(r"raise_exception\([^)]*\bsingle tool.?calls?\b")
"""In templates, such as Llama's, that refuse messages with several calls: clients could not send
them back."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ToolUse:
    """The calls that a text may have.

    Attributes:
      form: how the model writes them.
      tools: that may be called; none where only reasoning is to be told apart.
      required: whether the text is one call or several, and nothing else.
      parallel: whether there may be several.
    """

    form: CallForm
    tools: Sequence[Tool]
    required: bool
    parallel: bool

    def parser(self) -> CallParser:
        """A parser for one text."""
        return self.form.parser(frozenset(tool.name for tool in self.tools), parallel=self.parallel)

    def visible_ids(self, tokenizer: Tokenizer) -> frozenset[int]:
        """Ids of the form's marks, which the text must show though they may be special."""
        return frozenset(self._marks(tokenizer).values())

    def grammar(self, tokenizer: Tokenizer) -> str | None:
        """The grammar of the text; None if any text may come."""
        if not self.required and not any(tool.strict for tool in self.tools):
            return None
        marks = self._marks(tokenizer)
        taken = {*marks.values(), *tokenizer.eos_ids}
        rules = CallRules(
            required=self.required,
            parallel=self.parallel,
            marks=marks,
            others=sorted({*tokenizer.added_tokens.values()} - taken),
        )
        return self.form.grammar(self.tools, rules)

    def _marks(self, tokenizer: Tokenizer) -> dict[str, int]:
        added = tokenizer.added_tokens
        return {mark: added[mark] for mark in self.form.marks if mark in added}


def read_tool_use(
    fields: Mapping[str, Any], form: CallForm | None, template: str | None
) -> ToolUse | None:
    """The calls that a request asks for; None if it wants none and texts have no reasoning.

    Args:
      form: of `--tool_parser`; None takes that of the template.
      template: the model's chat template for conversations with these tools.

    Raises:
      ApiError: a field that is wrong, or that this model, or another field, leaves no way to heed.
    """
    tools = [_tool(tool, f"tools[{index}]") for index, tool in enumerate(fields.get("tools", ()))]
    choice = _choice(fields.get("tool_choice", "auto" if tools else "none"))
    form = form or form_of(template or "")
    if choice == "none":
        if form is None or not form.has_reasoning:
            return None
        return ToolUse(form=form, tools=(), required=False, parallel=True)
    if not tools:
        raise invalid(f"tool_choice = {shown(choice)} needs tools; give them", "tool_choice")
    _check_names([tool.name for tool in tools])
    if isinstance(choice, tuple):
        tools = [tool for tool in tools if tool.name in choice]
        if not tools:
            raise invalid(
                f"tool_choice names {shown(choice[0])}, which is none of the tools; give it, or "
                "name another",
                "tool_choice",
            )
    for name in _GRAMMARS:
        if name in fields and fields[name] != {"type": "text"}:
            raise invalid(
                f"{name} and tools both say what a text may be; leave out one, or give "
                'tool_choice = "none"',
                name,
            )
    return ToolUse(
        form=_form(form, template),
        tools=tools,
        required=choice != "auto",
        parallel=fields.get("parallel_tool_calls", True)
        and not isinstance(choice, tuple)
        and _ONE_CALL.search(template or "") is None,
    )


def _form(form: CallForm | None, template: str | None) -> CallForm:
    if template is None or not re.search(r"\btools\b", template):
        raise _unable("the chat template of this model takes no tools")
    if form is None:
        raise _unable(
            "how this model writes tool calls is not known; if it is one of "
            f"{', '.join(NAMES)}, start the server with --tool_parser, else"
        )
    return form


def _unable(why: str) -> ApiError:
    remedy = 'leave them out, or give tool_choice = "none"'
    return invalid(f"tools: {why}; {remedy}", "tools", "unsupported_parameter")


def _choice(choice: Any) -> str | tuple[str]:
    """The choice, or in a tuple the name of the function that is to be called."""
    if choice in ("none", "auto", "required"):
        return choice
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or choice != {"type": "function", "function": {"name": name}}:
        raise invalid(
            f"tool_choice = {shown(choice)} is not supported; give none, auto, required, or "
            '{"type": "function", "function": {"name": ...}}',
            "tool_choice",
        )
    return (name,)


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise _wrong(f"{where}.type", tool.get("type"), '"function", no other type is supported')
    where, function = f"{where}.function", tool.get("function")
    if not isinstance(function, Mapping):
        raise _wrong(where, function, "an object with the function's name")
    for name in function:
        if name not in _FUNCTION_FIELDS:
            param = f"{where}.{name}"
            raise invalid(f"{param}: there is no such field; leave it out", param, _UNKNOWN)
    name, strict = function.get("name"), function.get("strict")
    if not isinstance(name, str) or _NAME.fullmatch(name) is None:
        raise _wrong(f"{where}.name", name, "1 to 64 letters, digits, _ and -")
    if not isinstance(strict, bool | None):
        raise _wrong(f"{where}.strict", strict, "true or false")
    parameters = function.get("parameters")
    if parameters is None:
        parameters = _NO_PARAMETERS
    elif not isinstance(parameters, Mapping) or parameters.get("type", "object") != "object":
        raise _wrong(f"{where}.parameters", parameters, "the JSON schema of an object")
    return Tool(name=name, parameters={"type": "object", **parameters}, strict=strict or False)


def _wrong(param: str, value: object, remedy: str) -> ApiError:
    return invalid(f"{param} = {shown(value)}: give {remedy}", param)


def _check_names(names: Sequence[str]) -> None:
    if len(names) > MAX_TOOLS:
        raise invalid(f"tools has {len(names)} functions; give at most {MAX_TOOLS}", "tools")
    if len({*names}) < len(names):
        name = next(name for name in names if names.count(name) > 1)
        raise invalid(f"tools: {name!r} is there twice; give functions names of their own", "tools")
