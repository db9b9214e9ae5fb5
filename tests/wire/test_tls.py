"""Encrypted streams: who has which certificate, and what those get who have another or none."""

from __future__ import annotations

import pytest

from ssd_jax.errors import InputError
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.security import Files
from ssd_jax.wire.sockets import listen
from ssd_jax.wire.stream import Stream, StreamError, StreamServer
from tests.waiting import eventually
from tests.wire.ends import SIZE, TOKEN, echo, ended, serving


def pair(files, end):
    return {"cert": files[f"{end}.cert"], "key": files[f"{end}.key"]}


@pytest.fixture
def worker(files):
    """Starts workers with files of certificates; gives their addresses."""
    started = []

    def start(**about):
        tls = Files(**about).serving_context()
        listening = listen("127.0.0.1", 0)
        started.append(StreamServer(echo, listening, TOKEN, SIZE, Refusals(), tls=tls))
        return started[-1].address

    yield start
    for process in started:
        process.stop()


def asks(address, **about):
    stream = Stream(address, TOKEN, SIZE, tls=Files(**about).engine_context())
    stream.send(b"abc")
    try:
        return next(stream.answers())
    finally:
        stream.close()


def test_a_certificate_of_the_authority_for_the_workers_name_is_trusted(worker, files):
    address = worker(**pair(files, "worker"))
    assert asks(address, ca=files["ca"]) == b"cba"
    assert asks(address, ca=files["ca"], **pair(files, "engine")) == b"cba"


def test_an_engine_trusts_no_other_authority_and_no_other_name(worker, files, caplog):
    with pytest.raises(StreamError, match="certificate verify failed"):
        asks(worker(**pair(files, "worker")), ca=files["other"])
    with pytest.raises(StreamError, match="IP address mismatch"):
        asks(worker(**pair(files, "elsewhere")), ca=files["ca"])
    eventually(lambda: "127.0.0.1: [SSL" in caplog.text)


def test_a_worker_with_an_authority_wants_its_certificates(worker, files, caplog):
    address = worker(**pair(files, "worker"), ca=files["ca"])
    assert asks(address, ca=files["ca"], **pair(files, "engine")) == b"cba"
    for end in ({}, pair(files, "stranger")):
        with pytest.raises(StreamError):
            asks(address, ca=files["ca"], **end)
    eventually(lambda: "is refused" in caplog.text)
    assert asks(address, ca=files["ca"], **pair(files, "engine")) == b"cba"


def test_plain_text_and_tls_do_not_mix(worker, files, monkeypatch):
    monkeypatch.setattr("ssd_jax.wire.stream._HANDSHAKE", 0.5)
    with pytest.raises(StreamError, match=r"does not answer|closed"):
        asks(worker(**pair(files, "worker")))
    with pytest.raises(StreamError, match="SSL"):
        asks(worker(), ca=files["ca"])


def test_the_token_counts_with_certificates_too(files):
    with (
        serving("tls", files=files) as server,
        pytest.raises(StreamError, match="its token is another"),
    ):
        server.asks(token="guess")


def test_a_stranger_without_tls_is_sent_away(files, caplog):
    with serving("tls", files=files) as server:
        for _ in range(3):
            stranger = server.stranger()
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            assert ended(stranger, 5)
        assert server.asks() == b"cba"
        eventually(lambda: "[SSL" in caplog.text)
    assert sum("[SSL" in line for line in caplog.messages) == 1


def test_files_that_are_no_pem_are_named(files, tmp_path):
    nonsense = tmp_path / "nonsense.pem"
    nonsense.write_text("no certificate")
    certificate = pair(files, "worker")
    assert Files(**certificate).serving_context() is not None
    for wrong in ({"cert": str(nonsense)}, {"key": files["engine.key"]}):
        with pytest.raises(InputError, match=r"tls_cert = .* does not hold certificates in PEM"):
            Files(**certificate | wrong).serving_context()
    with pytest.raises(InputError, match=r"draft_tls_ca = .* does not hold certificates in PEM"):
        Files(ca=str(nonsense)).engine_context()
    with pytest.raises(InputError, match=r"draft_tls_ca = .* cannot be read"):
        Files(ca=str(tmp_path / "missing")).engine_context()
