"""The access log: what its lines say, and what they leave out."""

import json

import pytest

from tests.server.http_calls import call, post, raw, request_text, stream
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION = {"model": "m", "prompt": "secret", "max_tokens": 3}


@pytest.fixture
def log(tmp_path):
    """The file, and its lines once there are so many."""
    path = tmp_path / "access.jsonl"

    def lines(count):
        eventually(lambda: path.read_text().count("\n") >= count)
        return [json.loads(line) for line in path.read_text().splitlines()]

    lines.path = path
    return lines


def test_a_line_has_the_facts_of_a_request_but_no_text(log):
    with served(ScriptedEngine(), access_log=str(log.path)) as server:
        _, answer = post(server.port, "/v1/completions", {**COMPLETION, "n": 2})
        stream(server.port, "/v1/completions", {**COMPLETION, "speculation": "off"})
        first, second = log(2)
    assert first.pop("time").endswith("+00:00")
    assert 0 < first.pop("time_to_first_token") < first.pop("seconds") < 60
    assert first == {
        "id": answer["id"],
        "client": "127.0.0.1",
        "method": "POST",
        "path": "/v1/completions",
        "status": 200,
        "model": "m",
        "prompt_tokens": 6,
        "output_tokens": 6,
        "finish_reasons": ["length", "length"],
        "speculation": "auto",
        "modes": [],
        "hit_rate": None,
    }
    assert second["speculation"] == "off"
    assert "secret" not in log.path.read_text()
    assert "aaa" not in log.path.read_text()


def test_texts_are_logged_where_that_is_asked_for(log):
    with served(ScriptedEngine(), access_log=str(log.path), logs_texts=True) as server:
        post(server.port, "/v1/completions", COMPLETION)
        (line,) = log(1)
    assert (line["prompts"], line["texts"]) == (["secret"], ["aaa"])


def test_refusals_have_their_code_and_probes_no_line(log):
    keys = ("key-0123456789abcdef",)
    with served(ScriptedEngine(), access_log=str(log.path), keys=keys) as server:
        headers = {"Authorization": f"Bearer {keys[0]}"}
        for path in ("/health", "/metrics"):
            call(server.port, "GET", path, headers=headers)
        call(server.port, "POST", "/v1/completions", {**COMPLETION, "top_k": "x"}, headers)
        call(server.port, "POST", "/v1/completions", COMPLETION)
        call(server.port, "GET", "/v1/models/secret?secret", headers=headers)
        lines = log(3)
    found = [(line["path"], line["status"], line.get("error")) for line in lines]
    assert found == [
        ("/v1/completions", 400, "invalid_type"),
        ("/v1/completions", 401, "invalid_api_key"),
        ("/v1/models/secret", 404, "model_not_found"),
    ]


def test_a_client_that_leaves_has_a_line(log):
    engine = ScriptedEngine()
    engine.held = True
    with served(engine, access_log=str(log.path)) as server:
        with raw(server.port, request_text(COMPLETION)):
            eventually(lambda: engine.running == 1)
        (line,) = log(1)
    assert (line["status"], line["finish_reasons"]) == (499, ["cancelled"])


def test_a_log_that_was_moved_away_begins_anew(log):
    with served(ScriptedEngine(), access_log=str(log.path)) as server:
        post(server.port, "/v1/completions", COMPLETION)
        log(1)
        log.path.rename(log.path.with_suffix(".old"))
        post(server.port, "/v1/completions", COMPLETION)
        eventually(log.path.exists)
        assert len(log(1)) == 1
