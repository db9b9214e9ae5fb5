"""Events of streams, as clients take them apart that know less of lines than the standard says."""

import json

import pytest

from ssd_jax.server import streaming
from tests.server.http_calls import call

ENDS = "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"
"""All that `str.splitlines` splits at."""
PATHS = {
    "/v1/completions": {"prompt": "hi"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}]},
}


def texts_of(server, path):
    """The texts of a stream's events, one a line of its text."""
    _, _, answer = call(server.port, "POST", path, {**PATHS[path], "stream": True})
    lines = [line for line in answer.splitlines() if line]
    assert all(line.startswith("data: ") for line in lines)
    assert lines.pop() == "data: [DONE]"
    choices = [json.loads(line.removeprefix("data: "))["choices"][0] for line in lines]
    return [choice.get("text", choice.get("delta", {}).get("content", "")) for choice in choices]


@pytest.mark.parametrize("path", PATHS)
def test_no_text_has_what_any_client_takes_for_the_end_of_a_line(server, engine, path):
    engine.pieces = [f"a{end}b" for end in ENDS]
    assert "".join(texts_of(server, path)) == "".join(engine.pieces)


def test_texts_that_are_not_escaped_are_caught(server, engine, monkeypatch):
    engine.pieces = ["a\u2028b"]
    monkeypatch.setattr(streaming, "_ESCAPES", {})
    with pytest.raises((AssertionError, ValueError)):
        texts_of(server, "/v1/completions")


def test_errors_within_a_stream_are_escaped(server, engine):
    engine.error = streaming.ApiError(500, "a\u2028b")
    _, _, answer = call(server.port, "POST", "/v1/completions", {"prompt": "hi", "stream": True})
    first, *_ = answer.splitlines()
    assert json.loads(first.removeprefix("data: "))["error"]["message"] == "a\u2028b"
