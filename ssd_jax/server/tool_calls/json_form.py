"""Forms whose calls are JSON objects, `{"name": ..., "arguments": {...}}`, with marks around them.

Their grammars are in llguidance's form of Lark.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence

from ssd_jax.server.tool_calls.json_parser import JsonCallParser
from ssd_jax.server.tool_calls.protocols import CallParser, CallRules, Tool

_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""Objects as chat templates write them."""
_ANY_ARGUMENTS = {"type": "object"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class JsonForm:
    """One of these forms, a `CallForm`.

    Attributes:
      name: see `CallForm`.
      begin, end: the marks; no `end` is "".
      unmarked: whether calls usually come without `begin`, at the start of the text.
      inner: what stands between marks and object.
      separator: what stands between calls.
      arguments: the key of the arguments.
      in_templates: an expression that is found in the templates that ask for this form.
      in_others: one that is found in templates that look so, but ask for another.
    """

    name: str
    begin: str
    end: str = ""
    unmarked: bool = False
    inner: str = ""
    separator: str
    arguments: str
    in_templates: str
    in_others: str = r"(?!)"

    @property
    def marks(self) -> tuple[str, ...]:
        """Those of `CallForm`."""
        return (self.begin, self.end) if self.end else (self.begin,)

    @property
    def has_reasoning(self) -> bool:
        """That of `CallForm`."""
        return False

    def is_in(self, template: str) -> bool:
        """Whether a chat template asks for calls in this form."""
        return (
            re.search(self.in_templates, template) is not None
            and re.search(self.in_others, template) is None
        )

    def parser(self, names: frozenset[str], *, parallel: bool) -> CallParser:
        """A parser for one text; arguments as of `CallForm.parser`."""
        return JsonCallParser(
            names, begin=self.begin, end=self.end, unmarked=self.unmarked, parallel=parallel
        )

    def grammar(self, tools: Sequence[Tool], rules: CallRules) -> str:
        """The grammar of texts with calls of these tools."""
        calls = f"call ({_literal(self.separator)} call)*" if rules.parallel else "call"
        begin = "" if self.unmarked else f"{_mark(self.begin, rules)} {_literal(self.inner)}"
        end = f"{_literal(self.inner)} {_mark(self.end, rules)}" if self.end else ""
        start = [f"start: {calls}", f"call: {begin} object {end}"]
        if not rules.required:
            start = self._free_text(rules, calls, end)
        objects = " | ".join(f"object_{number}" for number in range(len(tools)))
        lines = ["%llguidance {}", *start, f"object: {objects}"]
        for number, tool in enumerate(tools):
            schema = tool.parameters if tool.strict or rules.required else _ANY_ARGUMENTS
            head = f'{{"name": {json.dumps(tool.name)}, "{self.arguments}": '
            styled = {"x-guidance": _STYLE, **schema}
            lines += [
                f"object_{number}: {_literal(head)} arguments_{number} {_literal('}')}",
                f"arguments_{number}: %json {json.dumps(styled, ensure_ascii=False)}",
            ]
        return "\n".join(lines)

    def _free_text(self, rules: CallRules, calls: str, end: str) -> list[str]:
        """Rules of a text that may have calls."""
        mark = rules.marks.get(self.begin)
        marked = [] if mark is None else [f"TEXT? <[{mark}]>"]
        other_token = [f"<[{_ranges(rules.others)}]>"] if rules.others else []
        other = [f"TEXT? {token}" for token in other_token]
        if self.unmarked:
            marked = [f"{opening} {calls}" for opening in marked]
            tag = "" if mark is None else f"<[{mark}]>?"
            several = [*marked, *other] if rules.parallel else other
            last = ["TEXT"] if rules.parallel else [*marked, "TEXT"]
            return [
                f"start: ({tag} {calls} | {_any_of(['FIRST', *other_token])} more)?",
                f"more: {_any_of(several, '*')} {_any_of(last, '?')}",
                "call: object",
                r"FIRST: /[ \t\r\n]*[^{ \t\r\n](.|\n)*/",
                "TEXT: /(.|\\n)+/",
            ]
        several, last = ["call", *other], ["TEXT"]
        if not rules.parallel:
            several, last = other, ["call", "TEXT"]
        return [
            f"start: {_any_of(several, '*')} {_any_of(last, '?')}",
            # Where the mark is spelled, or is a token like any other, its last letter opens a call.
            f"opening[lazy]: /(.|\\n)*{re.escape(self.begin)}/",
            f"call: {_any_of(['opening', *marked])} {_literal(self.inner)} object {end}",
            "TEXT: /(.|\\n)+/",
        ]


def _any_of(rules: Sequence[str], count: str = "") -> str:
    return f"({' | '.join(rules)}){count}" if rules else ""


def _literal(text: str) -> str:
    return json.dumps(text) if text else ""


def _mark(mark: str, rules: CallRules) -> str:
    return f"<[{rules.marks[mark]}]>" if mark in rules.marks else _literal(mark)


def _ranges(ids: Sequence[int]) -> str:
    """Sorted ids as llguidance writes sets of them."""
    runs: list[list[int]] = []
    for token in ids:
        if runs and token == runs[-1][1] + 1:
            runs[-1][1] = token
        else:
            runs.append([token, token])
    return ",".join(f"{first}-{last}" for first, last in runs)
