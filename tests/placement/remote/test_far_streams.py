"""An engine and its worker on another host: who starts, ends and waits for what."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import pytest

from ssd_jax.errors import InputError
from ssd_jax.placement.process import client, placement
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import connector
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.placement.remote import far_worker
from ssd_jax.placement.remote.far_worker import FarWorker
from ssd_jax.wire import handshake
from ssd_jax.wire.address import Address
from ssd_jax.wire.frames import Frames
from ssd_jax.wire.security import Files
from tests.placement.process.script import HELLO, SETTINGS, TOKEN, ScriptedDraft
from tests.placement.process.scripted import run_of
from tests.placement.remote.scripted import FAR, serving
from tests.waiting import eventually


@pytest.mark.parametrize("tls", [True, False])
def test_a_worker_that_does_not_answer_may_have_a_certificate_for_another_name(
    monkeypatch, tmp_path, tls
):
    """TLS tells nobody why."""
    silent = SimpleNamespace(alive=False, refused=False, trouble="", close=lambda: None)
    silent.wait_ready = lambda _seconds: False
    monkeypatch.setattr(far_worker, "Connection", lambda *_: silent)
    monkeypatch.setattr(far_worker, "ANSWER_SECONDS", -1.0)
    ca = tmp_path / "ca.pem"
    pytest.importorskip("trustme").CA().cert_pem.write_to_path(str(ca))
    files = Files(ca=str(ca)) if tls else Files()
    worker = FarWorker(SETTINGS, Address.parse("127.0.0.1:1", "here"), files)
    worker.start()
    words = (
        f"; with TLS its certificate must be for 127.0.0.1, still good, and signed by one in {ca}"
    )
    with pytest.raises(InputError) as raised:
        worker.wait_ready()
    assert str(raised.value).endswith(words) == tls


def test_a_worker_of_another_version_is_reported_as_one_at_once(monkeypatch):
    running = serving()
    newer = handshake.VERSION + 1
    with monkeypatch.context() as other:
        other.setattr(handshake, "VERSION", newer)
        hello = handshake.hello()
    monkeypatch.setattr(handshake, "hello", lambda: hello)
    worker = FarWorker(SETTINGS, Address.parse(running.address, "here"), Files())
    worker.start()
    both = f"version {newer} of the protocol, and version {handshake.VERSION} here"
    words = f"the draft worker at {running.address}: the worker refused: {both}"
    with pytest.raises(InputError, match=words):
        worker.wait_ready()
    running.stop()


def test_a_worker_on_another_host_is_not_ended(monkeypatch):
    ends = []

    def streams(_connect, counters, _address, end):
        ends.append(end)
        return SimpleNamespace(counters=counters, wait_ready=lambda timeout, until: True)

    monkeypatch.setattr(placement, "WorkerStreams", streams)
    far = FarWorker(SETTINGS, Address.parse("127.0.0.1:1", "here"), Files())
    placement.DraftWorker(SETTINGS, worker=far).draft()
    placement.DraftWorker(SETTINGS).draft()
    assert ends[0] is None
    assert ends[1] is not None


def test_the_first_draft_takes_the_stream_over_which_its_worker_was_waited_for():
    """Without a stream, the worker would drop the draft for what another engine wants."""
    streams = []

    def load(spec, _gone):
        return lambda called: streams.append(called) or DraftSession(spec, ScriptedDraft, called)

    running = serving(load)
    worker = placement.DraftWorker(
        SETTINGS, worker=FarWorker(SETTINGS, Address.parse(running.address, "here"), Files())
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
        running.stop()


def test_a_round_has_left_when_the_targets_forward_is_dispatched(monkeypatch):
    monkeypatch.setattr(Frames, "_send_or_queue", lambda frames, data: frames._unsent.extend(data))
    monkeypatch.setattr(client, "LEAVES", 60.0)
    asked, left = [], []
    running = serving()
    address, counters = running.address, Counter()
    connect = connector(HELLO, TOKEN, lambda: address, counters, link=FAR)
    streams = WorkerStreams(connect, counters, lambda: address)
    draft = RemoteDraft(HELLO, streams, patience=30.0)
    try:
        assert draft.streams.wait_ready(30)
        run = run_of(draft, backup="none")
        expand, forward = run.draft.expand, run.target.forward

        def expanding(request):
            answer = expand(request)
            asked.append(answer._link)
            return answer

        def forwarding(*arguments):
            left.append([link.stream.flush(0) for link in asked])
            asked.clear()
            return forward(*arguments)

        monkeypatch.setattr(run.draft, "expand", expanding)
        monkeypatch.setattr(run.target, "forward", forwarding)
        run.generate(count=1, size=20)
    finally:
        draft.close()
        running.stop()
    assert len(left) > 4
    assert all(map(all, left))
    assert all(left[:-2])  # at its end a text has no branches
