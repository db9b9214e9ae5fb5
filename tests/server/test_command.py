"""`ssd-jax serve` as a process: its socket, its signals, its status."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import threading

import pytest

from ssd_jax.cli import serve
from ssd_jax.cli.main import main
from ssd_jax.testing import tiny
from tests.placement.hosts.processes import free_port
from tests.server.http_calls import events_of, raw, request_text


@contextlib.contextmanager
def process(target, *flags):
    """A server of its own process, and its port."""
    port = free_port()
    command = [sys.executable, "-m", "ssd_jax", "serve", f"--target={target}", f"--port={port}"]
    started = subprocess.Popen(
        [*command, "--slots=2", "--compile_cache=off", *flags],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
    )
    try:
        assert started.stderr is not None
        line = next(line for line in started.stderr if line.startswith("serving"))
        assert f"http://127.0.0.1:{port}" in line
        yield started, port
    finally:
        started.kill()
        started.wait()


def begun(port, tokens):
    """A connection on which two texts have begun to come."""
    body = {"model": "tiny", "prompt": "a", "max_tokens": tokens, "ignore_eos": True, "n": 2}
    connection = raw(port, request_text({**body, "stream": True}))
    assert b"200 OK" in connection.recv(65536)
    return connection


def rest_of(connection):
    """The events that still come, until the connection ends."""
    return events_of(b"".join(iter(lambda: connection.recv(65536), b"")))


@pytest.fixture(scope="module")
def long_checkpoint(tmp_path_factory):
    """One whose texts may be long."""
    directory = tmp_path_factory.mktemp("long")
    return tiny.write_checkpoint(directory, max_position_embeddings=50_000)


def test_sigterm_under_load_answers_each_request_whole_or_refuses_it_and_ends_with_status_0(
    long_checkpoint,
):
    flags = ("--served_model_name=tiny", "--context=2048", "--drain_seconds=300")
    body = {"model": "tiny", "prompt": "b", "max_tokens": 20, "ignore_eos": True}
    with (
        process(long_checkpoint, *flags) as (server, port),
        begun(port, 1500) as connection,
        contextlib.ExitStack() as others,
    ):
        waiting = [others.enter_context(raw(port, request_text(body))) for _ in range(5)]
        server.send_signal(signal.SIGTERM)
        choices = [choice for event in rest_of(connection) for choice in event["choices"]]
        answers = [b"".join(iter(lambda other=other: other.recv(65536), b"")) for other in waiting]
        assert server.wait(300) == 0
    reasons = [choice["finish_reason"] for choice in choices if choice["finish_reason"]]
    assert reasons == ["length", "length"]
    for answer in answers:
        head, text = answer.split(b"\r\n\r\n")
        if b" 503 " not in head.splitlines()[0]:
            (choice,) = json.loads(text)["choices"]
            assert choice["finish_reason"] == "length"


def test_a_signal_that_another_thread_receives_ends_the_wait():
    def send():
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    with serve._Signals() as signals:
        signals.loaded = True
        sender = threading.Timer(0.2, send)
        sender.start()
        assert signals.wait() == 0
        sender.join()


@pytest.mark.more
def test_what_runs_longer_than_the_time_to_drain_ends_with_an_error(long_checkpoint):
    flags = ("--served_model_name=tiny", "--drain_seconds=0", "--context=50000")
    with process(long_checkpoint, *flags) as (server, port), begun(port, 40_000) as connection:
        server.send_signal(signal.SIGTERM)
        assert "error" in rest_of(connection)[-1]
        assert server.wait(300) == 0


def test_a_port_in_use_is_one_line_and_status_2(tiny_checkpoint, capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", f"--target={tiny_checkpoint}", f"--port={port}"]) == 2
    error = capsys.readouterr().err
    assert error.splitlines() == [
        f"ssd-jax serve: host = '127.0.0.1', port = {port}: the port is in use; give another --port"
    ]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--port=65536"], "port = 65536 is out of range; give 0 to 65535"),
        (["--port=-1"], "port = -1 is out of range"),
        (["--max_queue=-1"], "max_queue = -1 is out of range"),
        (["--max_body=0"], "max_body = 0 is out of range"),
        (["--request_timeout=0"], "request_timeout = 0 is out of range; give seconds above 0"),
        (["--limit_concurrency=0"], "limit_concurrency = 0 is out of range"),
        (["--api_key_file=/none/keys"], "api_key_file = '/none/keys' cannot be read"),
        (["--ssl_certfile=a"], "ssl_certfile and ssl_keyfile go together"),
        (["--allowed_origins=a"], "allowed_origins: 'a' is no origin"),
        (["--access_log_texts"], "access_log_texts is for an access log; give --access_log, too"),
        (["--tool_parser=xml"], "tool_parser = 'xml' is unknown; give one of openai, hermes, "),
        (["--host=192.0.2.1"], "give an address of this machine"),
        (["--kv_memory=1KiB"], "kv_memory = 1KiB holds 0 pages of 128 positions, and a"),
        (["--seed=3"], "seed is for a request; leave out --seed"),
        (["--logprobs=3"], "logprobs is for a request; leave out --logprobs"),
    ],
)
def test_bad_settings_are_one_line_and_status_2(flags, message, tiny_checkpoint, capsys):
    assert main(["serve", f"--target={tiny_checkpoint}", "--port=0", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_missing_packages_are_named(tiny_checkpoint, capsys, monkeypatch):
    monkeypatch.setattr(serve, "_PACKAGES", ("starlette", "no_such_package"))
    assert main(["serve", f"--target={tiny_checkpoint}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "serve needs no_such_package: install the extra" in line
