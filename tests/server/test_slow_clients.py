"""Clients that read slowly, or not at all."""

import contextlib
import socket
import time

import pytest

from ssd_jax.server.lifecycle import close_stalled
from tests.server.http_calls import events_of, post, request_text
from tests.server.scripted import ScriptedEngine, served
from tests.waiting import eventually

MODEL = "m" * 500  # each event names it
BODY = {"model": MODEL, "prompt": "x", "n": 6, "max_tokens": 50, "stream": True}
"""The events of its six texts are some 200,000 bytes: more than the server sends ahead."""


@contextlib.contextmanager
def slow_client(server):
    """A connection that takes some thousand bytes at a time, and asks for `BODY`."""
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.settimeout(300)
        connection.connect(("127.0.0.1", server.port))
        connection.sendall(request_text(BODY))
        yield connection


@pytest.fixture
def small_buffers():
    """A server whose sockets hold little of what is sent."""
    with served(ScriptedEngine(), model=MODEL) as server:
        server.listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        yield server


def test_a_client_that_reads_slowly_gets_all_of_its_texts(small_buffers):
    texts = dict.fromkeys(range(6), "")
    with slow_client(small_buffers) as connection:
        eventually(lambda: small_buffers.state.admission.texts == 6)
        time.sleep(0.3)
        data = b"".join(iter(lambda: connection.recv(2000), b""))
    for choice in (choice for event in events_of(data) for choice in event["choices"]):
        texts[choice["index"]] += choice["text"]
    assert {*texts.values()} == {"a" * 50}


@pytest.mark.skipif(not hasattr(socket, "TCP_USER_TIMEOUT"), reason="Linux alone closes them")
def test_a_client_that_takes_nothing_is_closed_and_its_request_ends(small_buffers):
    server = small_buffers
    close_stalled(server.listener, 3)
    with slow_client(server):
        eventually(lambda: server.state.admission.texts == 6)
        assert post(server.port, "/v1/completions", BODY | {"stream": False})[0] == 429
        eventually(lambda: server.state.admission.texts == 0)
    assert server.state.engine.running == 0
    assert post(server.port, "/v1/completions", BODY | {"stream": False})[0] == 200
