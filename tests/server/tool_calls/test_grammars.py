"""Grammars of calls: which texts they allow, to the token."""

from __future__ import annotations

import json

import pytest
from tokenizers import AddedToken

from ssd_jax.checkpoints.tokenizers.tokenizer import Tokenizer
from ssd_jax.engine.grammar import allows
from ssd_jax.llm.grammars import Grammars
from ssd_jax.sampling.structured_outputs import StructuredOutputsParams
from ssd_jax.server.tool_calls.forms import form_named
from ssd_jax.server.tool_calls.protocols import Tool
from ssd_jax.server.tool_calls.request import ToolUse
from tests.checkpoints.builders import backend, special
from tests.server.tool_calls.parsing import parse

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"x": {"$ref": "#/$defs/digit"}},
    "required": ["x"],
    "additionalProperties": False,
    "$defs": {"digit": {"type": "integer", "minimum": 0, "maximum": 9}},
}
ANY = {"type": "object"}
F = '{"name": "f", "arguments": {"x": 1}}'
FREE = '{"name": "f", "arguments": {"y": "::="}}'
G = '{"name": "g", "arguments": {"z": [1, 2]}}'


def tokenizer(kind):
    """Letters, and marks of calls as special tokens, as tokens like others, or spelled."""
    marks = ["<tool_call>", "</tool_call>", "<|python_tag|>"]
    if kind == "special":
        added = [special(mark) for mark in marks]
    elif kind == "plain":
        added = [AddedToken(mark, special=False, normalized=False) for mark in marks]
    else:
        added = []
    made = backend(special("<eos>"), special("<think>"), *added)
    return Tokenizer(made, eos_ids=[made.token_to_id("<eos>")], where="tiny")


@pytest.fixture(scope="module", params=["special", "plain", "spelled"])
def letters(request):
    return tokenizer(request.param)


def use(form, *, required=False, parallel=True, strict=True):
    tools = [
        Tool(name="f", parameters=SCHEMA, strict=strict),
        Tool(name="g", parameters=ANY, strict=strict),
    ]
    return ToolUse(form=form_named(form), tools=tools, required=required, parallel=parallel)


def follows(use, letters, text):
    """Whether the grammar allows the text, and its end."""
    outputs = StructuredOutputsParams(grammar=use.grammar(letters))
    matcher = Grammars(letters).compile(outputs).start()
    for token in letters.encode(text):
        if not allows(matcher.mask(), token):
            return False
        matcher.consume(token)
    (eos,) = letters.eos_ids
    return allows(matcher.mask(), eos)


def hermes(*calls):
    return "\n".join(f"<tool_call>\n{call}\n</tool_call>" for call in calls)


def llama(*calls):
    return "; ".join(call.replace("arguments", "parameters") for call in calls)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        (hermes(F), True),
        (hermes(G), True),
        (hermes(F, G, F), True),
        ("", False),
        (f"a{hermes(F)}", False),
        (f"{hermes(F)}a", False),
        (hermes(FREE), False),
        (hermes(F)[:-1], False),
        (hermes(F.replace("f", "h", 1)), False),
    ],
)
def test_required_calls_of_hermes(letters, text, is_allowed):
    assert follows(use("hermes", required=True), letters, text) == is_allowed
    one = use("hermes", required=True, parallel=False)
    assert follows(one, letters, text) == (is_allowed and text.count("name") == 1)


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [(llama(F), True), (llama(F, G), True), ("", False), (f"a{llama(F)}", False)],
)
def test_required_calls_of_llama(letters, text, is_allowed):
    assert follows(use("llama3_json", required=True), letters, text) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("plain {text} <tool_cal", True),
        ("<think>a<think>", True),
        (hermes(F), True),
        (f"a\n<think>b {hermes(F, G)} c {hermes(F)} <think> d", True),
        (hermes(FREE), False),
        (f"a {hermes(F)} b {hermes(FREE)}", False),
        ("<tool_call>", False),
        (f"a {hermes(F)[:-14]}", False),
    ],
)
def test_texts_with_calls_of_strict_tools_of_hermes(letters, text, is_allowed):
    assert follows(use("hermes"), letters, text) == is_allowed
    if text.count("name") == 0:
        assert follows(use("hermes", parallel=False), letters, text) == is_allowed


@pytest.mark.parametrize(
    ("text", "is_allowed"),
    [
        ("", True),
        ("plain {text}", True),
        ("<think>a<think>", True),
        (llama(F), True),
        (llama(F, G), True),
        (llama(FREE), False),
        ('{"x": 1}', False),
    ],
)
def test_texts_with_calls_of_strict_tools_of_llama(letters, text, is_allowed):
    assert follows(use("llama3_json"), letters, text) == is_allowed


def test_a_call_behind_the_tag_of_llama_is_held_to_its_schema():
    for kind in ("special", "plain"):
        letters = tokenizer(kind)
        assert follows(use("llama3_json"), letters, f"<|python_tag|>{llama(F)}")
        assert not follows(use("llama3_json"), letters, f"<|python_tag|>{llama(FREE)}")


def test_without_parallel_calls_there_is_one_at_most(letters):
    one = use("hermes", parallel=False)
    assert follows(one, letters, f"a {hermes(F)}")
    assert not follows(one, letters, hermes(F, G))


def test_tools_that_are_not_strict_take_any_arguments_beside_strict_ones(letters):
    tools = [Tool(name="f", parameters=SCHEMA), Tool(name="g", parameters=SCHEMA, strict=True)]
    form = form_named("hermes")
    both = ToolUse(form=form, tools=tools, required=False, parallel=True)
    assert follows(both, letters, hermes(FREE))
    assert not follows(both, letters, hermes(G))


def test_what_the_grammar_allows_is_what_the_parser_finds(letters):
    for form, text in [("hermes", hermes(F, G)), ("llama3_json", llama(F, G))]:
        asked = use(form, required=True)
        assert follows(asked, letters, text)
        content, calls = parse(asked.parser(), text)
        assert content == ""
        assert [(name, json.loads(arguments)) for name, arguments in calls] == [
            ("f", {"x": 1}),
            ("g", {"z": [1, 2]}),
        ]
