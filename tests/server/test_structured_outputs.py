"""Texts under a grammar through HTTP are those of Python, and a grammar that cannot be followed is
refused by the field that gave it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from ssd_jax import SamplingParams
from tests.checkpoints import tiny_pair
from tests.server import models
from tests.server.http_calls import error_of, post, stream

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


TEMPLATE = (
    '{# <tool_call> "arguments": #}{% for tool in tools %}{{ tool.function.name }}{% endfor %}'
    "{% for m in messages %}<eot>{{ m.content }}{% endfor %}<eot>"
)
PARAMETERS = {name: value for name, value in SCHEMA.items() if name != "x-guidance"}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A pair with the marks of calls, of which one is a special token, as in some families."""
    pair = tiny_pair.write(tmp_path_factory.mktemp("grammars"), "qwen3")
    for directory in map(Path, pair):
        tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        tokenizer.add_special_tokens(["<tool_call>"])
        tokenizer.add_tokens([AddedToken("</tool_call>", special=False, normalized=False)])
        tokenizer.save(str(directory / "tokenizer.json"))
        (directory / "chat_template.jinja").write_text(TEMPLATE)
    with models.opened(pair) as llm, models.served(llm) as server:
        yield server


def ask(server, **fields):
    body = {"model": "tiny", "prompt": "a", "seed": 5, **fields}
    return post(server.port, "/v1/completions", body)


@pytest.mark.parametrize(
    ("fields", "grammar"),
    [
        ({"response_format": FORMAT}, {"json": SCHEMA}),
        ({"structured_outputs": {"regex": "(ab|c){2,4}!"}}, {"regex": "(ab|c){2,4}!"}),
        ({"grammar": 'start: ("ab" | "c") "!"'}, {"grammar": 'start: ("ab" | "c") "!"'}),
    ],
    ids=["schema", "regex", "grammar"],
)
def test_texts_are_pythons(server, fields, grammar):
    status, answer = ask(server, max_tokens=40, **fields)
    assert status == 200, answer
    (choice,) = answer["choices"]
    params = SamplingParams(structured_outputs=grammar, max_tokens=40, temperature=1.0, seed=5)
    assert choice["text"] == server.llm.generate(server.llm.tokenizer.encode("a"), params)[0].text
    assert choice["finish_reason"] == "stop"
    if "json" in grammar:
        assert 0 <= json.loads(choice["text"])["n"] <= 99


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (
            {"response_format": {**FORMAT, "json_schema": {"schema": {"type": "x"}}}},
            "response_format",
        ),
        ({"structured_outputs": {"regex": "(a"}}, "structured_outputs"),
        ({"structured_outputs": {"grammar": "(" * 5000}}, "structured_outputs"),
        ({"grammar": "start: a"}, "grammar"),
    ],
    ids=["schema", "regex", "many brackets", "grammar"],
)
def test_what_cannot_be_followed_is_refused_by_its_field(server, fields, param):
    body = {"model": "tiny", "prompt": "a", **fields}
    status, error = error_of(server.port, "/v1/completions", body)
    assert (status, error["param"], error["code"]) == (400, param, "invalid_value")


def chat_fields(server, **fields):
    function = {"name": "f", "parameters": PARAMETERS, "strict": True}
    body = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "a"}],
        "tools": [{"type": "function", "function": function}],
        "parallel_tool_calls": False,
        "max_completion_tokens": 90,
        "seed": 5,
        # So that the model calls where it may; afterwards there is no other place for the mark.
        "logit_bias": {str(server.llm.tokenizer.added_tokens["<tool_call>"]): 1000},
    }
    return body | fields


def call_of(message):
    (call,) = message["tool_calls"]
    return message["content"], call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize(
    ("choice", "temperature"),
    [
        ("required", 0.0),
        ("auto", 1.0),
        ({"type": "function", "function": {"name": "f"}}, 1.0),
    ],
    ids=["required", "auto", "named"],
)
def test_calls_follow_their_schema_and_are_the_same_in_every_mode(server, choice, temperature):
    calls = set()
    for speculation in models.MODES:
        fields = chat_fields(
            server, tool_choice=choice, temperature=temperature, speculation=speculation
        )
        status, answer = post(server.port, "/v1/chat/completions", fields)
        assert status == 200, answer
        (reply,) = answer["choices"]
        assert reply["finish_reason"] == "tool_calls"
        calls.add(call_of(reply["message"]))
    chunks = stream(server.port, "/v1/chat/completions", fields)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    functions = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    calls.add((None, functions[0]["name"], "".join(part["arguments"] for part in functions)))
    ((content, name, arguments),) = calls
    assert (content, name) == (None, "f")
    assert 0 <= json.loads(arguments)["n"] <= 99


def test_parameters_that_are_no_schema_are_refused_as_tools(server):
    fields = chat_fields(server, tool_choice="required")
    fields["tools"][0]["function"]["parameters"] = {"properties": {"n": {"type": "x"}}}
    status, error = error_of(server.port, "/v1/chat/completions", fields)
    assert (status, error["param"]) == (400, "tools")


@pytest.mark.parametrize(
    "more", [{"min_tokens": 9}, {"bad_words": ["yes"]}], ids=["min_tokens", "bad_words"]
)
def test_a_grammar_that_leaves_only_what_is_banned_is_refused_with_the_reason(server, more):
    fields = {"structured_outputs": {"choice": ["yes"]}, "max_tokens": 40, **more}
    body = {"prompt": "a", **fields}
    status, error = error_of(server.port, "/v1/completions", body)
    assert (status, error["type"]) == (400, "invalid_request_error")
    assert "ban all that it could generate" in error["message"]
    *_, last = stream(server.port, "/v1/completions", body)
    assert "ban all that it could generate" in last["error"]["message"]


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": "a" * 50_000}, "prompt"),
        ("/tokenize", {"prompt": "a" * 50_000}, "prompt"),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": "a" * 50_000}]},
            "messages",
        ),
        (
            "/v1/chat/completions",
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a" * 50_000}]}]},
            "messages",
        ),
    ],
)
def test_texts_that_cannot_fit_are_refused_before_their_tokens_are_counted(
    server, monkeypatch, path, fields, param
):
    monkeypatch.setattr(server.llm.tokenizer, "_backend", None)
    status, error = error_of(server.port, path, fields)
    assert (status, error["param"]) == (400, param)
    assert "50000 characters" in error["message"]
