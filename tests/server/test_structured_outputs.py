"""Texts under a grammar through HTTP are those of Python, and a grammar that cannot be followed is
refused by the field that gave it."""

from __future__ import annotations

import json

import pytest

from ssd_jax import SamplingParams
from tests.checkpoints import tiny_pair
from tests.server import models
from tests.server.http_calls import error_of, post

pytest.importorskip("llguidance")

SCHEMA = {
    "type": "object",
    "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["n"],
    "additionalProperties": False,
    "x-guidance": {"whitespace_flexible": False},
}
FORMAT = {"type": "json_schema", "json_schema": {"name": "n", "schema": SCHEMA}}


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    pair = tiny_pair.write(tmp_path_factory.mktemp("grammars"), "qwen3")
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
