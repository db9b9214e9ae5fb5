"""An interrupt may come at any place of a remote draft; the same texts go on, and hit again."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest

from ssd_jax.placement.host_proposals import HostProposals
from ssd_jax.placement.process import connection, placement
from ssd_jax.placement.process.client import RemoteBranches, RemoteDraft, RemoteRecords
from ssd_jax.placement.process.connection import Connection, OwnedBranches
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.roles.records import SlotOpening, no_branches, no_promotion
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.draft_texts import DraftTexts
from ssd_jax.wire.messages import Open, Prefill, RecordMessage
from tests.fakes.stepwise import asked_branches, asked_records
from tests.placement.process.script import HELLO, SETTINGS, SLOTS, K, M
from tests.placement.process.scripted import only_misses, request, text
from tests.placement.process.serving import served

PLACES = [
    (RemoteDraft, "prefill"),
    (RemoteDraft, "record"),
    (RemoteDraft, "expand"),
    (RemoteBranches, "branches"),
    (RemoteRecords, "proposal"),
    (RemoteRecords, "_take_q"),
    (HostProposals, "put"),
    (HostProposals, "proposal"),
    (DraftTexts, "teach"),
    (DraftTexts, "record"),
    (Connection, "send"),
    (Connection, "ask_records"),
    (Connection, "ask_branches"),
    (Connection, "branches"),
    (Connection, "record_tokens"),
]
JUST_IN_TIME = [(RemoteRecords, "lengths"), (RemoteRecords, "tokens")]


def interruptions():
    """Places by backup; CI runs those without a backup, too."""
    for backup, places in (("none", PLACES), ("draft", [*PLACES, *JUST_IN_TIME])):
        marks = [pytest.mark.more] if backup == "none" else []
        for where, call in places:
            name = f"{where.__name__}.{call}-{backup}"
            yield pytest.param(where, call, backup, id=name, marks=marks)


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("where", "call", "backup"), list(interruptions()))
def test_a_step_that_is_interrupted_is_made_up_for(monkeypatch, where, call, after, backup):
    works, left, interrupts = getattr(where, call), [0], []

    def interrupted(*args, **kwargs):
        left[0] -= 1
        if left[0]:
            return works(*args, **kwargs)
        if after:
            works(*args, **kwargs)
        interrupts.append(args)
        raise KeyboardInterrupt

    monkeypatch.setattr(where, call, interrupted)
    monkeypatch.setattr(connection, "_RETRY", 1e-3)
    with served(backup=backup) as run:
        for at in (1, 2, 7):
            left[0], expected = 0, {}
            assert run.draft.streams.wait_ready(30)
            for index in range(3):
                number = run.engine.add(request(index, max_tokens=24, temperature=1.0))
                expected[number] = text(24)
            left[0] = at
            while run.engine.has_work:
                try:
                    events = run.engine.step()
                except KeyboardInterrupt:
                    continue
                for event in events:
                    if event.output is not None:
                        assert event.output.token_ids == expected.pop(event.request_id)
            assert not expected
        assert len(interrupts) >= 2
        left[0] = 0
        run.until(only_misses)
        assert run.draft.counters["garbage"] == 0
        assert "Error" not in run.draft.streams.trouble


class Link:
    """A connection that notes what is sent; it answers branches, and no just-in-time draft."""

    alive = ready = answered = True
    refused, trouble = False, ""
    stream = SimpleNamespace(flush=lambda timeout: True)

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    ask_records = ask_branches = send

    def record_tokens(self, timeout):
        return None

    def close(self):
        self.alive = False

    def branches(self, forwards, timeout, until=None):
        branches = no_branches(SLOTS, M, K, K)
        branches.bonus[0, 0], branches.lengths[0, 0] = 50, K
        branches.tokens[0] = 40
        return OwnedBranches(np.array([1, -1]), branches, complete=True)


def drafting(connect):
    """A draft that waits for nothing."""
    return RemoteDraft(HELLO, WorkerStreams(connect, Counter()), patience=0.01)


def records(*rows):
    """A promotion of records: at a position, after these tokens, of a branch or none."""
    promotion = no_promotion(SLOTS, K)
    for slot, (position, committed, winner) in enumerate(rows):
        promotion.position[slot], promotion.pending[slot] = position, [3, *committed][-1]
        promotion.committed[slot, : len(committed)] = committed
        promotion.winner[slot], promotion.limit[slot] = winner, K * (winner >= 0)
        promotion.tokens[slot] = 40 * (winner >= 0)
    return promotion


@pytest.mark.parametrize("late", [False, True])
def test_a_row_whose_round_was_not_expanded_is_taught_its_text_again(late):
    """Another row waited in vain for tokens, so nothing of that round was expanded."""
    link = Link()
    draft = drafting(lambda: link)
    counts = np.zeros((SLOTS, K + 1), np.int32)
    counts[:, 0] = M
    for slot in range(SLOTS):
        draft.open(SlotOpening(slot, SamplingParams(), slot))
        draft.prefill(slot, [1, 2, 3], 0)
    asked_records(draft, records((2, [], -1), (2, [], -1)))
    asked_branches(draft, counts, K).branches(K)
    answer = asked_records(draft, records((3, [50], 0), (3, [9], -1)), [0, K * late])
    assert not answer.lengths().any()
    answer.proposal()
    asked_branches(draft, counts, K).branches(K)
    before = len(link.sent)
    asked_records(draft, records((4 + K, [*[40] * K, 60], -1), (4, [8], -1)))
    taught = {m.slot: m.tokens.tolist() for m in link.sent[before:] if isinstance(m, Prefill)}
    assert taught == ({0: [50, *[40] * K, 60], 1: [9, 8]} if late else {})
    assert draft.counters["late"] == int(late)


def test_a_stream_that_is_there_at_once_is_told_all_of_a_text():
    """A prompt in another slot may have opened it, before any round was without one."""
    links = [Link(), Link()]
    draft = drafting(iter(links).__next__)
    counts = np.zeros((SLOTS, K + 1), np.int32)
    counts[0, 0] = M
    draft.open(SlotOpening(0, SamplingParams()))
    draft.prefill(0, [1, 2, 3], 0)
    asked_records(draft, records((2, [], -1)))
    asked_branches(draft, counts, K).branches(K)
    links[0].close()
    asked_records(draft, records((3, [50], 0)))
    opened, prefilled, message = links[1].sent
    assert isinstance(opened, Open)
    assert prefilled.tokens.tolist() == [1, 2, 3, 50]
    assert message.winner[0] == -1
    assert message.tokens[0, : message.limit[0]].tolist() == [40] * K


def test_records_that_nobody_expands_are_sent_all_the_same():
    """A text near its end has no branches."""
    link = Link()
    draft = drafting(lambda: link)
    for prompt in ([1, 2, 3], [4, 5]):
        draft.open(SlotOpening(0, SamplingParams()))
        draft.prefill(0, prompt, 0)
        asked_records(draft, records((len(prompt) - 1, [], -1)))
    sent = [message for message in link.sent if isinstance(message, RecordMessage)]
    assert [(message.position[0], message.epochs[0]) for message in sent] == [(2, 1), (1, 2)]


def test_an_interrupt_while_a_worker_is_greeted_leaves_no_stream(monkeypatch):
    def interrupted(_self, _timeout, until):
        raise KeyboardInterrupt

    closed = []
    monkeypatch.setattr(WorkerStreams, "wait_ready", interrupted)
    monkeypatch.setattr(RemoteDraft, "close", lambda self: closed.append(self))
    worker = placement.DraftWorker(SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        worker.draft()
    assert len(closed) == 1
    assert not worker.drafts
