"""Streams between hosts: who is let in, how large they are, which way they go, when they leave."""

from __future__ import annotations

import queue
import socket
import struct
import threading
import time
from collections import Counter
from types import SimpleNamespace

import grpc
import msgspec
import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import client, placement, server
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import Connection, connector
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.supervisor import WorkerSettings
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.placement.remote import far_worker
from ssd_jax.placement.remote.far_worker import FarWorker
from ssd_jax.wire import codec, transport
from ssd_jax.wire.address import Address
from ssd_jax.wire.refusals import Refusals
from ssd_jax.wire.security import Files
from ssd_jax.wire.transport import METHOD
from ssd_jax.wire.transport import TOKEN as KEY
from tests.placement.process.script import HELLO, TOKEN, ScriptedDraft
from tests.placement.process.scripted import run_of
from tests.placement.process.serving import connecting
from tests.placement.process.test_session import OPEN
from tests.placement.remote.scripted import FAR, WANTED, serving
from tests.waiting import eventually


def settings_of_nothing() -> WorkerSettings:
    return WorkerSettings(
        token="", hello=HELLO, source="", target=None, dtype="float32", drafting={},
        draft_temperature=None, compile_cache=None, cores=None, budgets=(), attention="auto",
    )  # fmt: skip


@pytest.mark.parametrize("tls", [True, False])
def test_a_worker_that_does_not_answer_may_have_a_certificate_for_another_name(
    monkeypatch, tmp_path, tls
):
    """TLS tells nobody why."""
    silent = SimpleNamespace(alive=False, refused=False, trouble="", close=lambda: None)
    silent.wait_ready = lambda _seconds: False
    monkeypatch.setattr(far_worker, "Connection", lambda *_: silent)
    monkeypatch.setattr(far_worker, "ANSWER", -1.0)
    ca = tmp_path / "ca.pem"
    pytest.importorskip("trustme").CA().cert_pem.write_to_path(str(ca))
    files = Files(ca=str(ca)) if tls else Files()
    worker = FarWorker(settings_of_nothing(), Address.parse("127.0.0.1:1", "here"), files)
    worker.start()
    words = (
        f"; with TLS its certificate must be for 127.0.0.1, still good, and signed by one in {ca}"
    )
    with pytest.raises(InputError) as raised:
        worker.wait_ready()
    assert str(raised.value).endswith(words) == tls


def test_a_worker_of_another_version_of_the_protocol_is_reported_as_one_at_once():
    def answers(_requests, _gone):
        yield b"SSD" + bytes([codec.VERSION + 1]) + b"!"

    settings, refusals = msgspec.structs.replace(settings_of_nothing(), token=TOKEN), Refusals()
    where = Address("127.0.0.1", 0)
    running, address = transport.serve_far(
        answers, TOKEN, where, None, size=2**22, streams=1, refusals=refusals
    )
    worker = FarWorker(settings, Address.parse(address, "here"), Files())
    worker.start()
    both = f"version {codec.VERSION + 1} of the protocol; this is version {codec.VERSION}"
    with pytest.raises(InputError, match=f"the draft worker at {address}: the worker sent {both}"):
        worker.wait_ready()
    running.stop(None)


def test_a_worker_elsewhere_is_nobodys_to_end(monkeypatch):
    ends = []

    def streams(_connect, counters, _address, end):
        ends.append(end)
        return SimpleNamespace(counters=counters, wait_ready=lambda timeout, until: True)

    monkeypatch.setattr(placement, "WorkerStreams", streams)
    settings = settings_of_nothing()
    far = FarWorker(settings, Address.parse("127.0.0.1:1", "here"), Files())
    placement.DraftWorker(settings, elsewhere=far).draft()
    placement.DraftWorker(settings).draft()
    assert ends[0] is None
    assert ends[1] is not None


def test_the_first_draft_takes_the_stream_over_which_its_worker_was_waited_for():
    """Without a stream, the worker would drop the draft for what another engine wants."""
    streams = []

    def load(wanted, _gone):
        return lambda called: (
            streams.append(called) or DraftSession(wanted.hello, ScriptedDraft, called)
        )

    running, address = serving(load)
    about = {name: getattr(WANTED, name) for name in WANTED.__struct_fields__}
    settings = msgspec.structs.replace(settings_of_nothing(), token=TOKEN, **about)
    worker = placement.DraftWorker(
        settings, elsewhere=FarWorker(settings, Address.parse(address, "here"), Files())
    )
    try:
        worker.start()
        worker.wait_ready()
        assert len(streams) == 1
        draft = worker.draft()
        assert run_of(draft).generate()["miss"] > 0
        assert len(streams) == draft.counters["connections"] == 1
        worker.draft()
        assert len(streams) == 2
        worker.end_last()
        eventually(lambda: len(streams) == 3)
        assert worker.draft().counters["connections"] == 1
        assert len(streams) == 3
    finally:
        worker.close()
        running.stop(None)


def far(**settings):
    """See `connecting`; the worker is reached as one elsewhere."""
    running, address = serving(**settings)
    return connecting(address, lambda: running.stop(None), FAR)


@pytest.mark.parametrize("metadata", [(), ((KEY, "another"),), ((KEY, TOKEN), (KEY, TOKEN))])
@pytest.mark.parametrize("said", [[], [b"no message"], [codec.encode(HELLO)]])
def test_nothing_of_a_stranger_is_read(monkeypatch, metadata, said):
    """Nor does it get a thread: no number of them keeps an engine out."""
    monkeypatch.setattr(server.codec, "decode", lambda *_: pytest.fail("a message was read"))
    asked, wait = [], threading.Event()

    def messages():
        yield from said
        wait.wait(60)

    running, address = serving(lambda *asks: asked.append(asks), streams=1)
    with grpc.insecure_channel(address) as channel:
        for _ in range(20):
            call = channel.stream_stream(METHOD)(messages(), metadata=metadata, timeout=60)
            with pytest.raises(grpc.RpcError) as raised:
                next(call)
            assert raised.value.code() == grpc.StatusCode.UNIMPLEMENTED
        wait.set()
    running.stop(None)
    assert not asked


def test_strangers_whose_metadata_are_no_text_fill_no_log(caplog):
    def frame(kind, flags, stream, payload):
        return struct.pack(">IBI", len(payload) << 8 | kind, flags, stream) + payload

    fields = {b":path": METHOD.encode(), b"te": b"trailers", b"content-type": b"application/grpc"}
    fields |= {b":authority": b"localhost", KEY.encode(): b"\xff"}
    said = b"".join(
        b"\0" + bytes([len(key)]) + key + bytes([len(value)]) + value
        for key, value in fields.items()
    )
    opening = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"")
    running, address = serving()
    host, port = address.rsplit(":", 1)
    for _ in range(3):
        with socket.create_connection((host, int(port)), timeout=10) as stranger:
            stranger.sendall(opening + frame(1, 5, 1, b"\x83\x86" + said))
            heard = b""
            while b"Method not found" not in heard:
                heard += stranger.recv(4096)
    running.stop(None)
    assert "Invalid encoding" not in caplog.text
    assert caplog.text.count("metadata are no text") == 1


@pytest.mark.parametrize("name", ["http_proxy", "grpc_proxy"])
def test_no_proxy_comes_between(monkeypatch, name):
    monkeypatch.setenv(name, "http://127.0.0.1:9")
    with far() as connect:
        assert connect().wait_ready(10)


def test_who_is_not_known_leaves_no_heap_of_messages(monkeypatch):
    decoded = []
    read = codec.decode

    def decode(data, about):
        decoded.append(read(data, about))
        return decoded[-1]

    monkeypatch.setattr(server.codec, "decode", decode)
    inbox = server._Inbox(HELLO, Refusals())
    inbox.start(iter([codec.encode(OPEN)] * 9))
    eventually(lambda: decoded)
    time.sleep(0.1)
    assert len(decoded) == 1
    inbox.admitted.set()
    eventually(lambda: len(decoded) == 9)


class Slow(queue.SimpleQueue):
    """Gives nothing at once."""

    def get(self, *arguments, **more):
        item = super().get(*arguments, **more)
        time.sleep(0.02)
        return item


def test_a_round_has_left_when_the_targets_forward_is_dispatched(monkeypatch):
    monkeypatch.setattr(transport, "queue", SimpleNamespace(SimpleQueue=Slow))
    monkeypatch.setattr(client, "LEAVES", 60.0)
    asked, left = [], []
    running, address = serving()
    counters = Counter()
    connect = connector(HELLO, TOKEN, lambda: address, counters, link=FAR)
    streams = WorkerStreams(connect, counters, lambda: address)
    draft = RemoteDraft(HELLO, streams, patience=30.0)
    try:
        assert draft.streams.wait_ready(30)
        run = run_of(draft, backup="none")
        expand, forward = run.draft.expand, run.target.forward

        def expanding(*arguments, **more):
            expand(*arguments, **more)
            asked.append(run.draft._link)

        def forwarding(*arguments):
            left.append([link.stream.flush(0) for link in asked])
            asked.clear()
            return forward(*arguments)

        monkeypatch.setattr(run.draft, "expand", expanding)
        monkeypatch.setattr(run.target, "forward", forwarding)
        run.generate(count=1, size=20)
    finally:
        draft.close()
        running.stop(None)
    assert len(left) > 4
    assert all(map(all, left))
    assert all(left[:-2])  # at its end a text has no branches


def test_a_message_that_does_not_leave_is_not_waited_for(monkeypatch):
    held = threading.Event()

    class Held(queue.SimpleQueue):
        def get(self, *arguments, **more):
            item = super().get(*arguments, **more)
            held.wait(60)
            return item

    monkeypatch.setattr(transport, "queue", SimpleNamespace(SimpleQueue=Held))
    with far() as connect:
        link = connect()
        assert not link.stream.flush(0.01)
        held.set()
        assert link.stream.flush(60)


def test_a_stream_keeps_no_place_among_the_broken_ones():
    """Channels to one address share what they have learnt of it, unless they are told not to."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    address = f"127.0.0.1:{port}"
    for _ in range(3):
        broken = Connection(address, HELLO, TOKEN, Counter(), FAR)
        assert not broken.wait_ready(10)
    with socket.create_server(("127.0.0.1", port)) as listening:
        listening.settimeout(0.9)  # gRPC would wait a second or more
        again = Connection(address, HELLO, TOKEN, Counter(), FAR)
        listening.accept()[0].close()
        again.close()
