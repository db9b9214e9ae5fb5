"""Hostile input, clients that leave, and more requests than fit."""

import contextlib
import json
import random
import threading
import time

import pytest

from ssd_jax.server import bodies
from ssd_jax.system.open_files import allow_most_files
from tests.server.http_calls import call, error_of, post, raw, request_text
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

COMPLETION = {"model": "m", "prompt": "hi", "max_tokens": 3}


def test_a_body_that_is_declared_too_large_is_refused_unread(server, monkeypatch):
    monkeypatch.setattr(bodies, "_REST_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100000000\r\n\r\n"
    with raw(server.port, head) as connection:
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert answer.startswith(b"HTTP/1.1 413")
    assert b"100000 bytes" in answer


def test_a_client_that_sends_100_megabytes_all_the_same_sees_the_error(server):
    status, _, value = call(server.port, "POST", "/v1/completions", bytes(100_000_000))
    assert (status, value["error"]["code"]) == (413, "request_too_large")


def test_a_body_that_never_ends_is_read_for_a_while_and_its_connection_closed(server, monkeypatch):
    monkeypatch.setattr(bodies, "_REST_SECONDS", 0.2)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"

    def send_for_ever(connection):
        end = time.monotonic() + 60
        while time.monotonic() < end:
            connection.sendall(chunk)

    with raw(server.port, head) as connection, pytest.raises(OSError, match=r"reset|pipe"):
        send_for_ever(connection)


def test_a_body_of_unknown_size_is_cut_off_at_the_limit(server):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    chunk = b"10000\r\n" + b" " * 0x10000 + b"\r\n"
    with raw(server.port, head + 2 * chunk) as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 413")
    assert post(server.port, "/v1/completions", COMPLETION)[0] == 200


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"1",
        b"null",
        b"{",
        b'{"model": "m", "prompt": "\xff"}',
        b'{"model": "m", "prompt": "\\ud800"}',
        b'{"model": "m", "prompt": "a", "temperature": NaN}',
        b'{"model": "m", "prompt": "a", "seed": ' + b"9" * 5000 + b"}",
        b'{"model": "m", "prompt": "a", "temperature": 1e999}',
        b'{"model": "m", "prompt": ' + b"[" * 40000 + b"]" * 40000 + b"}",
        b'{"model": "m", "prompt": [' + b"[" * 400 + b"]" * 400 + b"]}",
        b'{"a": ' * 9000 + b"1" + b"}" * 9000,
        b'{"model": "m", "prompt": [[]]}' + b"x",
        json.dumps({"model": "m", "prompt": list(range(10_000))}).encode(),
        json.dumps({"model": "m", "prompt": "a" * 90_000}).encode(),
        json.dumps({"model": "m", "prompt": "a", "n": 2**31 - 1}).encode(),
        json.dumps({"model": "m", "prompt": ["a"] * 10_000}).encode(),
    ],
)
def test_hostile_bodies_get_a_clean_error(server, body):
    status, _, value = call(server.port, "POST", "/v1/completions", body)
    assert status == 400, value
    assert value["error"]["message"]
    assert post(server.port, "/v1/completions", COMPLETION)[0] == 200


def test_a_prompt_that_is_too_long_is_named(server):
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "prompt": "a" * 200})
    assert (status, error["param"], error["code"]) == (400, "prompt", "context_length_exceeded")


def test_unknown_paths_and_methods_get_errors_of_the_same_shape(server):
    status, _, value = call(server.port, "GET", "/nowhere")
    assert (status, *value) == (404, "error")
    status, headers, value = call(server.port, "GET", "/v1/completions")
    assert (status, headers["allow"], *value) == (405, "POST", "error")


def test_what_is_no_http_gets_400(server):
    with raw(server.port, b"\x16\x03\x01 hello\r\n\r\n") as connection:
        assert connection.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_full_queue_gets_429_and_the_seconds_to_wait(server, engine):
    engine.held = True
    threads = [
        threading.Thread(target=post, args=(server.port, "/v1/completions", COMPLETION))
        for _ in range(6)
    ]
    for thread in threads:
        thread.start()
    eventually(lambda: server.state.admission.texts == 6)
    assert (server.state.admission.running, server.state.admission.waiting) == (2, 4)
    status, headers, value = call(server.port, "POST", "/v1/completions", COMPLETION)
    assert (status, value["error"]["code"]) == (429, "queue_full")
    assert int(headers["retry-after"]) >= 1
    engine.held = False
    for thread in threads:
        thread.join()
    assert post(server.port, "/v1/completions", COMPLETION)[0] == 200


def test_more_texts_than_may_ever_wait_are_refused_as_bad_input(server):
    status, error = error_of(server.port, "/v1/completions", {**COMPLETION, "n": 7})
    assert (status, error["param"]) == (400, "n")
    prompts = {**COMPLETION, "prompt": ["a"] * 7}
    assert error_of(server.port, "/v1/completions", prompts)[1]["param"] == "prompt"


@pytest.mark.parametrize("streams", [False, True])
def test_a_client_that_leaves_frees_what_it_has_asked_for(server, engine, streams):
    engine.held = True
    connection = raw(server.port, request_text({**COMPLETION, "stream": streams}))
    eventually(lambda: engine.running == 1)
    connection.close()
    eventually(lambda: engine.running == 0 and server.state.admission.texts == 0)


def test_clients_that_leave_at_random_moments_leave_nothing_behind():
    rng, engine = random.Random(3), ScriptedEngine()
    before = threading.active_count()
    with served(engine, queue=500) as server:
        for turn in range(100):
            body = {**COMPLETION, "stream": rng.random() < 0.5, "max_tokens": 50, "n": 2}
            data = request_text(body)
            cut = rng.choice([len(data), len(data), rng.randrange(len(data))])
            with raw(server.port, data[:cut]) as connection:
                if turn % 4 == 0:
                    connection.settimeout(0.02 * rng.random() + 0.001)
                    with contextlib.suppress(TimeoutError):
                        connection.recv(rng.randrange(1, 500))
        eventually(lambda: engine.running == 0 and server.state.admission.texts == 0)
        assert post(server.port, "/v1/completions", COMPLETION)[0] == 200
    eventually(lambda: threading.active_count() <= before + 1)


def test_a_thousand_idle_connections_stop_no_one(server):
    allow_most_files()
    with contextlib.ExitStack() as idle:
        for _ in range(1000):
            idle.enter_context(raw(server.port, b""))
        assert post(server.port, "/v1/completions", COMPLETION)[0] == 200


def test_draining_refuses_new_requests_and_finishes_old_ones(server, engine):
    engine.held = True
    answers = []
    asking = threading.Thread(
        target=lambda: answers.append(post(server.port, "/v1/completions", COMPLETION))
    )
    asking.start()
    eventually(lambda: engine.running == 1)
    drained = []
    draining = threading.Thread(target=lambda: drained.append(server.drain(60)))
    draining.start()
    eventually(lambda: call(server.port, "GET", "/health/ready")[0] == 503)
    assert post(server.port, "/v1/completions", COMPLETION)[0] == 503
    engine.held = False
    draining.join()
    asking.join()
    assert drained == [True]
    assert answers[0][0] == 200


def test_draining_ends_after_its_time(server, engine):
    engine.held = True
    with raw(server.port, request_text(COMPLETION)):
        eventually(lambda: engine.running == 1)
        start = time.monotonic()
        assert not server.drain(0.1)
        assert time.monotonic() - start < 60
