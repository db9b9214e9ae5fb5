"""The form of gpt-oss, OpenAI's harmony: calls are messages to `functions.NAME`."""

from __future__ import annotations

import json
from collections.abc import Sequence

from typing_extensions import override

from ssd_jax.checkpoints.chat.harmony import MARKS, HarmonyReader, MessagePart, writes_harmony
from ssd_jax.server.tool_calls.protocols import (
    Arguments,
    CallBegin,
    CallParser,
    CallRules,
    Content,
    Delta,
    Reasoning,
    Tool,
)

_FUNCTION = "functions."
_BREAK = "\n\n"
_ANY_ARGUMENTS = {"type": "object"}


class HarmonyForm:
    """A `CallForm`."""

    name = "openai"
    marks = MARKS
    has_reasoning = True

    def is_in(self, template: str) -> bool:
        """Whether a chat template writes messages in channels."""
        return writes_harmony(template)

    def parser(self, names: frozenset[str], *, parallel: bool) -> CallParser:
        """A parser for one text; arguments as of `CallForm.parser`."""
        return HarmonyParser(names, parallel=parallel)

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        """The grammar of texts that reason, and then answer or call one of these tools."""

        def mark(name: str) -> str:
            text = f"<|{name}|>"
            return f"<[{rules.marks[text]}]>" if text in rules.marks else json.dumps(text)

        message, again = mark("message"), f'{mark("end")} {mark("start")} "assistant"'
        call = " | ".join(f"call_{number}" for number in range(len(tools)))
        lines = [
            "%llguidance {}",
            f"start: before* ({call if rules.required else f'{call} | answer'})",
            f'before: {mark("channel")} ("analysis" | "commentary") {message} TEXT? {again}',
            f'answer: {mark("channel")} "final" {message} TEXT?',
            "TEXT: /(.|\\n)+/",
        ]
        for number, tool in enumerate(tools):
            schema = tool.parameters if tool.strict or rules.required else _ANY_ARGUMENTS
            head = json.dumps(f"commentary to={_FUNCTION}{tool.name} ")
            lines += [
                f'call_{number}: {mark("channel")} {head} {mark("constrain")} "json" {message} '
                f"arguments_{number}",
                f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}",
            ]
        return "\n".join(lines)


HARMONY = HarmonyForm()


class HarmonyParser(CallParser):
    """Tells reasoning, answer and calls apart.

    Messages to the user are content, those in the channel `analysis` and those to others than the
    given functions are reasoning. A blank line stands between two of a kind.

    Args:
      names, parallel: see `CallForm.parser`.
    """

    def __init__(self, names: frozenset[str], *, parallel: bool) -> None:
        self._names, self._parallel = names, parallel
        self._reader = HarmonyReader()
        self._calls = 0
        self._written: set[type[Content | Reasoning]] = set()
        self._break = ""

    @override
    def push(self, text: str) -> list[Delta]:
        return self._deltas(self._reader.push(text))

    @override
    def finish(self) -> list[Delta]:
        return self._deltas(self._reader.finish())

    def _deltas(self, pieces: Sequence[MessagePart]) -> list[Delta]:
        return [delta for piece in pieces for delta in self._of(piece)]

    def _of(self, piece: MessagePart) -> list[Delta]:
        function = (piece.recipient or "").removeprefix(_FUNCTION)
        is_call = piece.recipient == _FUNCTION + function and function in self._names
        if is_call and piece.is_first:
            self._calls += 1
        if self._calls > 1 and not self._parallel:
            return []
        if is_call:
            return [CallBegin(function)] if piece.is_first else [Arguments(piece.text)]
        kind = Reasoning if piece.channel == "analysis" or piece.recipient else Content
        if piece.is_first:
            self._break = _BREAK if kind in self._written else ""
            return []
        self._written.add(kind)
        text, self._break = self._break + piece.text, ""
        return [kind(text)]
