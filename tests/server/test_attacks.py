"""Requests that are written to cost a server much: each is refused, soon, and others go on."""

from __future__ import annotations

import json
import time

import pytest
from pydantic import ValidationError

from ssd_jax.server import connections, generation
from ssd_jax.server.fields import CHAT, COMPLETION, DETOKENIZE
from ssd_jax.system.files import nearest
from tests.server.http_calls import call, error_of, post, raw, request_text
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION_BODY = {"prompt": "hi", "max_tokens": 3}
MESSAGES = [{"role": "user", "content": "hi"}]
HUGE = 10**400
"""No float, and no integer of 64 bits."""
MANY = 10**5
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"


def rest(connection):
    """What still comes, until the connection ends."""
    return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nHost: x\r\nA"])
def test_a_connection_that_does_not_end_the_head_of_a_request_is_closed(server, monkeypatch, sent):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.2)
    with raw(server.port, sent) as connection:
        connection.settimeout(300)
        assert rest(connection) == b""


def test_a_head_that_comes_byte_by_byte_is_not_waited_for_for_ever(server, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.3)

    def send_on(connection):
        for _ in range(500):
            connection.sendall(b"a: b\r\n")
            time.sleep(0.02)

    with (
        raw(server.port, b"GET / HTTP/1.1\r\n") as connection,
        pytest.raises(OSError, match=r"reset|pipe"),
    ):
        send_on(connection)


def test_a_request_that_runs_longer_than_a_head_may_take_is_answered(server, engine, monkeypatch):
    monkeypatch.setattr(connections, "HEAD_SECONDS", 0.5)
    engine.held = True
    with raw(server.port, request_text(COMPLETION_BODY)) as connection:
        eventually(lambda: engine.running == 1)
        time.sleep(1)
        engine.held = False
        assert rest(connection).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize(
    "head",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 200_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n" + b"a: b\r\n" * 50_000 + b"\r\n",
        b"GET /" + b"a" * 200_000 + b" HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        POST + b"Content-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        b"GET / HTTP/1.1\r\n\r\n",
        b"GET /\x00 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\nA: \x00\r\n\r\n",
    ],
    ids=range(11),
)
def test_malformed_and_endless_heads_get_a_4xx_and_the_connection_is_closed(server, head):
    with raw(server.port, head) as connection:
        connection.settimeout(300)
        try:
            answer = rest(connection)
        except ConnectionResetError:  # what was sent behind the limit is not read
            return
    assert answer.startswith((b"HTTP/1.1 4", b"HTTP/1.1 501")), answer[:80]


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_no_other_protocol_is_spoken(server, protocol):
    headers = {"Connection": "Upgrade", "Upgrade": protocol, "Sec-WebSocket-Version": "13"}
    status, found, _ = call(server.port, "GET", "/version", headers=headers)
    assert (status, found["upgrade"]) == (200, None)


@pytest.mark.parametrize(
    "path",
    [
        *(
            "/../../etc/passwd",
            "/%2e%2e/%2e%2e/etc/passwd",
            "/..%2f..%2fetc%2fpasswd",
            "//etc/passwd",
        ),
        *("/%00", "/v1/models/../../etc/passwd", "/v1/models/%2e%2e%2fetc", "http://example.org/"),
        *("/status.json/..", "/?file=/etc/passwd%00", "/v1//completions", "/v1/completions/"),
    ],
)
def test_paths_lead_to_the_routes_alone(server, path):
    with raw(
        server.port, f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode()
    ) as c:
        answer = rest(c)
    status = int(answer.split()[1])
    assert status in ((200,) if path.startswith("/?") else (307, 404, 405))
    assert b"root:" not in answer


NUMBERS = (
    *("temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty"),
    *("repetition_penalty", "timeout", "n", "max_tokens", "min_tokens", "top_k", "seed", "k"),
    *("logprobs",),
)


@pytest.mark.parametrize("value", [HUGE, -HUGE, 2**63, -(2**63) - 1])
@pytest.mark.parametrize("field", NUMBERS)
def test_numbers_beyond_all_limits_are_refused_by_their_field(server, field, value):
    if abs(value) < HUGE and (field == "seed" or (field == "timeout" and value > 0)):
        return  # a seed has 64 bits, and any number of seconds is one
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION_BODY, field: value})
    assert (status, error["param"]) == (400, field), error


@pytest.mark.parametrize(
    "fields",
    [
        {"logit_bias": {"1": HUGE}},
        {"logit_bias": {"-1": -HUGE}},
        {"logit_bias": {"1e3": 1}},
        {"logit_bias": {"1": 1, "01": 1}},
        {"stop": ["x"] * MANY},
        {"stop": "x" * MANY},
        {"bad_words": ["x"] * MANY},
        {"logit_bias": dict.fromkeys(map(str, range(MANY)), 1)},
        {"logit_bias": dict.fromkeys(map(str, range(MANY)), "x")},
        {"structured_outputs": {"choice": ["x"] * MANY * 2}},
        {"structured_outputs": {"regex": "x" * MANY * 2}},
        {"grammar": "x" * MANY * 2},
        {"response_format": {"type": "x" * MANY}},
        {"prompt": ["x"] * MANY},
        {"prompt": [[1]] * MANY},
        {"prompt": [0] * MANY},
    ],
    ids=range(16),
)
def test_large_and_strange_values_are_refused_by_their_field(fields):
    with served(ScriptedEngine(), max_body=8 << 20) as server:
        status, error = error_of(server.port, "/v1/completions", {**COMPLETION_BODY, **fields})
    assert (status, error["param"]) == (400, next(iter(fields))), error
    assert len(json.dumps(error)) < 4000


def test_the_last_of_several_fields_of_one_name_counts_as_in_all_of_json(server):
    data = b'{"prompt": "a", "prompt": 3, "max_tokens": 2, "max_tokens": 1, "prompt": "b"}'
    status, _, value = call(server.port, "POST", "/v1/completions", data)
    assert (status, value["choices"][0]["text"]) == (200, "a")  # the engine says it once


@pytest.mark.parametrize(
    ("form", "fields"),
    [
        (COMPLETION, {"prompt": [1] * MANY + ["a"]}),
        (COMPLETION, {"prompt": [[1] * MANY, ["a"] * MANY]}),
        (COMPLETION, {"prompt": "a", "stop": [1] * MANY}),
        (COMPLETION, {"prompt": "a", "stop_token_ids": ["a"] * MANY}),
        (COMPLETION, {"prompt": "a", "bad_words": [1] * MANY}),
        (COMPLETION, {"prompt": "a", "logit_bias": dict.fromkeys(map(str, range(MANY)), "a")}),
        (CHAT, {"messages": [1] * MANY}),
        (CHAT, {"messages": MESSAGES, "stop": [[1]] * MANY}),
        (DETOKENIZE, {"tokens": ["a"] * MANY}),
    ],
    ids=range(9),
)
def test_of_many_wrong_items_the_first_alone_is_looked_at(form, fields):
    with pytest.raises(ValidationError) as found:
        form.model.model_validate(fields)
    assert found.value.error_count() < 10


@pytest.mark.parametrize(
    "fields",
    [
        {"x" * MANY: 1},
        {"model": "x" * MANY},
        {"stream": True, "stream_options": {"x" * MANY: 1}},
        {"structured_outputs": {"x" * MANY: 1}},
        {"speculation": "x" * MANY},
    ],
    ids=["field", "model", "nested", "grammar", "keyword"],
)
def test_a_long_name_is_not_sent_back_whole(fields):
    with served(ScriptedEngine(), max_body=8 << 20) as server:
        status, error = error_of(server.port, "/v1/completions", {**COMPLETION_BODY, **fields})
    assert status in (400, 404)
    assert len(json.dumps(error)) < 4000


def test_names_that_are_too_long_to_be_meant_are_not_compared():
    assert nearest("x" * 10**8, ["xx", "y"]) is None
    assert nearest("tempature", ["temperature", "top_p"]) == "temperature"


def test_many_texts_with_many_log_probabilities_are_refused(server, monkeypatch):
    monkeypatch.setattr(generation, "MOST_LOGPROBS", 1000)
    for fields, param in (
        ({"n": 3, "logprobs": 20, "max_tokens": 20}, "n"),
        ({"prompt": ["hi"] * 3, "logprobs": 20, "max_tokens": 20}, "prompt"),
        ({"prompt": ["a" * 40] * 3, "logprobs": 10, "echo": True, "max_tokens": 0}, "prompt"),
    ):
        status, error = error_of(server.port, "/v1/completions", {**COMPLETION_BODY, **fields})
        assert (status, error["param"]) == (400, param)
        assert "at most 1000" in error["message"]
    alone = {**COMPLETION_BODY, "logprobs": 20, "max_tokens": 90}
    assert post(server.port, "/v1/completions", alone)[0] == 200
