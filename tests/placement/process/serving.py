"""Engines over workers in this process, well behaved or not."""

from __future__ import annotations

from collections import Counter
from contextlib import contextmanager
from unittest import mock

from ssd_jax.placement.process import server
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import Connection, connector
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.wire import stream
from tests.placement.process.script import HELLO, TOKEN, ScriptedDraft
from tests.placement.process.scripted import run_of


@contextmanager
def connecting(address, stop, *link):
    """A function that opens connections to a worker in this process, which `stop` ends; `link` as
    `Connection` takes it."""
    opened = []

    def connect():
        opened.append(Connection(address, HELLO, TOKEN, Counter(), *link))
        return opened[-1]

    connect.address = address
    try:
        yield connect
    finally:
        for connection in opened:
            connection.close()
        stop()


def steady_streams():
    """Within, streams last whose ends are in this process, all threads of which may stand still
    for a while."""
    return mock.patch.object(stream, "SILENCE", 60.0)


@contextmanager
def served(
    session=DraftSession,
    draft=ScriptedDraft,
    *,
    patience=30.0,
    backup="none",
    hello=HELLO,
    token=TOKEN,
    pace=None,
    end=None,
    limit=None,
    silence=None,
):
    """An engine over a worker in this process."""
    sessions = []

    def make(called):
        sessions.append(session(HELLO, draft, called))
        return sessions[-1]

    serving, counters = server.serve(make, HELLO, TOKEN), Counter()
    connect = connector(hello, token, lambda: serving.address, counters)
    streams = WorkerStreams(connect, counters, lambda: serving.address, end)
    streams.limit, streams.silence = limit or streams.limit, silence or streams.silence
    remote = RemoteDraft(hello, streams, patience=patience)
    try:
        with steady_streams():
            streams.wait_ready(60 if limit is None else 2)
            yield run_of(remote, backup=backup, pace=pace)._replace(sessions=sessions)
    finally:
        remote.close()
        serving.stop()


class Rogue(DraftSession):
    """Changes answers by `change(message, answers before it)`, which gives what is sent instead."""

    change = None

    def __init__(self, *arguments, **more):
        super().__init__(*arguments, **more)
        self.sent = []

    def handle(self, message):
        for answer in super().handle(message):
            yield from type(self).change(answer, self.sent)
            self.sent.append(answer)


def rogue(change):
    return type("Changed", (Rogue,), {"change": staticmethod(change)})
