"""Whatever nonsense a worker sends, the text is the same; counters say what happened."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from ssd_jax.placement.process import server
from ssd_jax.placement.process.connection import Connection
from ssd_jax.wire.messages import BranchMessage, RecordTokens
from tests.placement.process.scripted import only_misses
from tests.placement.process.serving import rogue, served


def garbage(**changes):
    def change(answer, sent):
        if isinstance(answer, BranchMessage) and len(sent) == 20:
            fields = {name: new(getattr(answer, name)) for name, new in changes.items()}
            return [msgspec.structs.replace(answer, **fields)]
        return [answer]

    return change


@pytest.mark.parametrize(
    "change",
    [
        garbage(tokens=lambda tokens: tokens + 1000),
        garbage(tokens=lambda tokens: tokens[:, :, :1]),
        garbage(bonus=lambda bonus: bonus - 5),
        garbage(lengths=lambda lengths: lengths + 50),
        garbage(confidence=lambda confidence: confidence + 50),
        garbage(slots=lambda slots: slots + 7),
        garbage(slots=lambda slots: np.zeros((), np.int32)),
        garbage(epochs=lambda epochs: epochs.astype(np.float32)),
    ],
)
def test_garbage_ends_the_stream_and_another_is_opened(change):
    with served(rogue(change)) as run:
        causes = run.until(lambda found: run.draft.counters["connections"] >= 2)
        ended = run.draft.counters["garbage"]
        assert ended in (run.draft.counters["connections"] - 1, run.draft.counters["connections"])
        assert causes["dead"] > 0
        assert causes["miss"] > 0


def hollow(name, *shape):
    """A message of an array without entries, but of a size."""
    return msgspec.msgpack.encode([name, 1, [], ["i4", list(shape), b""]])


NOISE = [
    b"SSD",
    b"\0" * 40,
    b"SSD\x63\0\0\0\0",
    b"\xff\xff",
    hollow("RecordTokens", 0, 2**63),
]


@pytest.mark.parametrize("data", NOISE)
def test_malformed_bytes_end_the_stream(monkeypatch, data):
    sent = []

    class Broken:
        decode = staticmethod(server.codec.decode)

        @staticmethod
        def encode(message, encode=server.codec.encode):
            sent.append(message)
            return data if len(sent) == 20 else encode(message)

    with served() as run:
        monkeypatch.setattr(server, "codec", Broken)
        run.until(lambda found: run.draft.counters["connections"] >= 2 and only_misses(found))
        assert run.draft.counters["garbage"] == 1
        assert run.draft.counters["dead"] > 0


def q_with(**changes):
    def change(answer, sent):
        if isinstance(answer, RecordTokens):
            fields = {name: new(getattr(answer, name)) for name, new in changes.items()}
            return [msgspec.structs.replace(answer, **fields)]
        return [answer]

    return change


@pytest.mark.parametrize(
    "change",
    [
        q_with(q=lambda q: q * np.nan),
        q_with(q=lambda q: q * 2),
        q_with(support=lambda ids: np.where(ids == ids[..., :1], ids, 128)),  # 128 is no token
        q_with(q=lambda q: q[..., ::-1] * np.float32([-1, 1])),
        q_with(q=lambda q: q * np.float32([0, 4])),  # not of the token
        q_with(support=lambda ids: ids[..., :1].repeat(2, axis=-1)),
        q_with(tokens=lambda tokens: (tokens + 1) % 128),
    ],
)
def test_rows_whose_q_is_malformed_are_verified_as_point_masses(change):
    with served(rogue(change)) as run:
        run.generate(count=2, temperature=1.0)
        assert run.draft.counters["q malformed"] > 5
        assert run.draft.counters["connections"] == 1
        for _, proposal in run.target.verified:
            assert set(np.unique(proposal.q)) <= {0, 1}


def test_rows_whose_q_does_not_come_are_verified_as_point_masses():
    def drop(answer, sent):
        return [] if isinstance(answer, RecordTokens) else [answer]

    with served(rogue(drop), patience=0.2) as run:
        run.generate(count=1, size=20, temperature=1.0)
        assert run.draft.counters["q late"] > 3
        for _, proposal in run.target.verified:
            assert set(np.unique(proposal.q)) <= {0, 1}


def test_an_answer_that_breaks_the_receiver_ends_the_stream_too(monkeypatch):
    """Else every later round would wait for a connection that nobody reads."""
    taken = []

    def take(connection, message, take=Connection._handle):
        taken.append(message)
        if len(taken) == 20:
            raise ArithmeticError("unforeseen")
        take(connection, message)

    monkeypatch.setattr(Connection, "_handle", take)
    with served() as run:
        run.until(lambda found: run.draft.counters["connections"] >= 2 and only_misses(found))
        assert run.draft.counters["garbage"] == 1
