"""Plain HTTP requests to a server of a test."""

from __future__ import annotations

import http.client
import json
import socket

SECONDS = 300
"""That a server may be silent."""


def call(port, method, path, body=None, headers=()):
    """Status, headers and JSON (or text) of a response."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=SECONDS)
    data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
    connection.request(method, path, data, dict(headers))
    response = connection.getresponse()
    text = response.read()
    connection.close()
    is_json = response.headers["content-type"].startswith("application/json")
    return response.status, response.headers, json.loads(text) if is_json else text.decode()


def post(port, path, body):
    """Status and JSON of a POST."""
    status, _, value = call(port, "POST", path, body)
    return status, value


def error_of(port, path, body):
    """Status and error object of a POST that is refused."""
    status, value = post(port, path, body)
    assert set(value) == {"error"}, value
    assert set(value["error"]) == {"message", "type", "param", "code"}
    return status, value["error"]


def stream(port, path, body):
    """The JSON of each event of a stream, which must end with [DONE]."""
    status, headers, text = call(port, "POST", path, {**body, "stream": True})
    assert status == 200, text
    assert headers["content-type"].startswith("text/event-stream")
    assert text.endswith("data: [DONE]\n\n")
    return events_of(text.encode())


def events_of(data):
    """The JSON of each event of a stream's bytes, which must end with [DONE].

    Lines end at newlines alone: a text may have what `str.splitlines` takes for ends of lines.
    """
    lines = [line for line in data.split(b"\n") if line.startswith(b"data: ")]
    *events, done = [line.removeprefix(b"data: ") for line in lines]
    assert done == b"[DONE]"
    return [json.loads(event) for event in events]


def raw(port, data):
    """A socket on which this was sent."""
    connection = socket.create_connection(("127.0.0.1", port), timeout=SECONDS)
    connection.sendall(data)
    return connection


def request_text(body):
    """The bytes of a POST to `/v1/completions`, which closes its connection."""
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data
