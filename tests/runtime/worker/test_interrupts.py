"""An interrupt may come at any place of a remote draft; the same texts go on, and hit again."""

from __future__ import annotations

import numpy as np
import pytest
from ssd_jax.placement.process.texts import SlotText

from ssd_jax.placement.process import placement
from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.connection import Connection
from ssd_jax.placement.process.messages import Prefill, Speculations
from ssd_jax.placement.process.proposals import HostProposals
from ssd_jax.roles.records import Moved
from ssd_jax.sampling.confidence import UNKNOWN
from ssd_jax.sampling.params import SamplingParams
from tests.runtime.worker.scripted import HELLO, SLOTS, K, M, only_misses, request, text
from tests.runtime.worker.serving import served
from tests.runtime.worker.test_supervisor import SETTINGS

PLACES = [
    (RemoteDraft, "prefill"),
    (RemoteDraft, "move"),
    (RemoteDraft, "expand"),
    (RemoteDraft, "news"),
    (RemoteDraft, "settled"),
    (RemoteDraft, "_take_q"),
    (HostProposals, "clear"),
    (HostProposals, "put"),
    (HostProposals, "now"),
    (SlotText, "teach"),
    (SlotText, "moved"),
    (Connection, "send"),
    (Connection, "ask"),
    (Connection, "speculations"),
    (Connection, "winner"),
]


@pytest.mark.parametrize("backup", ["none", "draft"])
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("where", "call"), PLACES, ids=[f"{where.__name__}.{call}" for where, call in PLACES]
)
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
    monkeypatch.setattr(placement, "_RETRY", 1e-3)
    with served(backup=backup) as run:
        for at in (1, 2, 3, 7, 8):
            left[0], expected = 0, {}
            assert run.draft.wait_ready(30)
            for index in range(3):
                number = run.engine.add(request(index, max_tokens=40, temperature=1.0))
                expected[number] = text(40)
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
        assert len(interrupts) >= 3
        left[0] = 0
        run.until(only_misses)
        assert run.draft.counters["garbage"] == 0
        assert "Error" not in run.draft.trouble


class Link:
    """A connection that notes what is sent; it answers branches, and no just-in-time draft."""

    alive = ready = answered = True
    refused, trouble, address = False, "", "nowhere"

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(message)

    ask = send

    def winner(self, timeout):
        return None

    def close(self):
        self.alive = False

    def keep_time(self, numbers):
        pass

    def speculations(self, forwards, timeout):
        bonus, lengths = np.full((1, M), -1, np.int32), np.zeros((1, M), np.int32)
        bonus[0, 0], lengths[0, 0] = 50, K
        answer = Speculations(
            number=0,
            complete=True,
            slots=np.array([0], np.int32),
            epochs=np.array([1], np.int32),
            bonus=bonus,
            lengths=lengths,
            tokens=np.full((1, M, K), 40, np.int32),
            confidence=np.full((1, M, K), UNKNOWN, np.int32),
        )
        return answer, K


@pytest.mark.parametrize("late", [False, True])
def test_a_row_whose_round_was_not_expanded_is_taught_its_text_again(late):
    """Another row waited in vain for tokens, so nothing of that round was expanded."""
    link = Link()
    draft = RemoteDraft(HELLO, lambda: link, patience=0.01)
    lowered, counts = np.zeros((SLOTS, K), np.int32), np.zeros((SLOTS, K + 1), np.int32)
    counts[:, 0] = M
    for slot in range(SLOTS):
        draft.open(slot, SamplingParams(), slot, [], 0)
        draft.prefill(slot, [1, 2, 3], 0)
    draft.move([Moved(slot=slot, position=2, pending=3) for slot in range(SLOTS)])
    draft.expand(counts, follow=np.zeros(SLOTS, bool), lowered=lowered, forwards=K)
    draft.news(K)
    hit = Moved(slot=0, position=3, pending=50, committed=[50], winner=0, limit=K)
    draft.move([hit, Moved(slot=1, position=3, pending=9, committed=[9])])
    if late:
        assert not draft.draft(np.array([0, K], np.int32), lowered=lowered).any()
    draft.settled()
    draft.expand(counts, follow=np.zeros(SLOTS, bool), lowered=lowered, forwards=K)
    draft.news(K)
    before = len(link.sent)
    all_of_it = Moved(slot=0, position=4 + K, pending=60, committed=[*[40] * K, 60])
    draft.move([all_of_it, Moved(slot=1, position=4, pending=8, committed=[8])])
    taught = {m.slot: m.tokens.tolist() for m in link.sent[before:] if isinstance(m, Prefill)}
    assert taught == ({0: [50, *[40] * K, 60], 1: [9, 8]} if late else {})
    assert draft.counters["late"] == int(late)


def test_an_interrupt_while_a_worker_is_greeted_leaves_no_stream(monkeypatch):
    def interrupted(_self, _timeout):
        raise KeyboardInterrupt

    closed = []
    monkeypatch.setattr(RemoteDraft, "wait_ready", interrupted)
    monkeypatch.setattr(RemoteDraft, "close", lambda self: closed.append(self))
    worker = placement.DraftWorker(SETTINGS)
    with pytest.raises(KeyboardInterrupt):
        worker.draft()
    assert len(closed) == 1
    assert not worker.drafts
