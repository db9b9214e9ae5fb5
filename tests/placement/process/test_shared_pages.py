"""A draft elsewhere reuses pages that it has filled itself, and a new one starts from none."""

from __future__ import annotations

import dataclasses
from collections import Counter
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest

from ssd_jax.placement.process.client import RemoteDraft
from ssd_jax.placement.process.session import DraftSession
from ssd_jax.placement.process.worker_streams import WorkerStreams
from ssd_jax.placement.submesh import SubmeshDraft
from ssd_jax.roles.drafting import Drafting
from ssd_jax.roles.records import ALL, SlotOpening, no_promotion
from ssd_jax.sampling.params import SamplingParams
from ssd_jax.speculation.draft_texts import DraftTexts
from ssd_jax.wire import codec
from ssd_jax.wire.draft_spec import DraftSpec
from ssd_jax.wire.fields import ProtocolError
from ssd_jax.wire.messages import ExpandMessage, MorePages, Open, Prefill, RecordMessage
from tests.fakes.stepwise import asked_branches, asked_records

SIZE = 4
ROUND = RecordMessage, ExpandMessage
HELLO = DraftSpec(
    model="tiny",
    slots=2,
    context=64,
    tokens=128,
    drafting=Drafting(k=2, support=1, rule="coupled"),
    budgets=(4,),
    dtype="float32",
    page_size=SIZE,
    pages=16,
)
PROMPT = [*range(10)]
FIRST = SlotOpening(0, SamplingParams(), pages=[0, 1, 2, 3])
SECOND = SlotOpening(1, SamplingParams(), pages=[0, 1, 4, 5], reused=2 * SIZE)


class Link:
    """A connection to a worker that takes what it is sent."""

    alive = ready = answered = True
    refused, trouble = False, ""
    stream = SimpleNamespace(heard=True, flush=lambda timeout: True)

    def __init__(self):
        self.sent = []

    def send(self, message):
        self.sent.append(codec.decode(codec.encode(message), HELLO))

    ask_records = ask_branches = send

    def close(self):
        self.alive = False

    def reused(self):
        """By slot."""
        return {
            message.opening.slot: message.opening.reused
            for message in self.sent
            if type(message) is Open
        }

    def prompt(self, slot):
        return [
            token
            for message in self.sent
            if isinstance(message, Prefill) and message.slot == slot
            for token in message.tokens.tolist()
        ]


def remote():
    """A remote draft, and the links that it has opened."""
    links = []

    def connect():
        links.append(Link())
        return links[-1]

    return RemoteDraft(HELLO, WorkerStreams(connect, Counter())), links


def enter(draft, opening):
    draft.open(opening)
    draft.prefill(opening.slot, PROMPT, 0)


def test_a_worker_is_told_what_it_may_reuse_and_all_of_the_prompt():
    draft, links = remote()
    enter(draft, FIRST)
    enter(draft, SECOND)
    assert links[0].reused() == {0: 0, 1: 2 * SIZE}
    assert links[0].prompt(1) == PROMPT


def started_again(draft, links):
    enter(draft, FIRST)
    links[0].close()
    enter(draft, SECOND)


def test_a_worker_that_was_started_again_reuses_none_of_the_pages_of_the_one_before_it():
    draft, links = remote()
    started_again(draft, links)
    assert links[1].reused() == {1: 0}
    assert links[1].prompt(1) == PROMPT
    draft.open(SlotOpening(0, SamplingParams(), pages=[0, 1, 6], reused=2 * SIZE))
    draft.prefill(0, PROMPT, 0)
    assert links[1].reused()[0] == 2 * SIZE, "the second request has filled them again"


def test_a_worker_that_answers_late_was_not_given_the_pages():
    draft, links = remote()
    enter(draft, SlotOpening(1, SamplingParams(), pages=[8, 9, 10]))
    draft.streams.overdue, Link.answered = True, False
    try:
        enter(draft, FIRST)
    finally:
        Link.answered = True
    assert links[0].reused() == {1: 0}
    enter(draft, SECOND)
    assert links[0].reused()[1] == 0


def test_a_draft_that_keeps_lost_pages_is_caught(monkeypatch):
    monkeypatch.setattr(DraftTexts, "forget_pages", lambda self: None)
    draft, links = remote()
    started_again(draft, links)
    assert links[1].reused() != {1: 0}


def test_reuse_beyond_the_pages_is_refused():
    alone = msgspec.structs.replace(HELLO, page_size=0, pages=0)
    asked = SlotOpening(0, SamplingParams(), pages=(0, 1), reused=2 * SIZE)
    none = SlotOpening(0, SamplingParams(), reused=SIZE)
    for opening, hello in ((asked, HELLO), (none, alone)):
        with pytest.raises(ProtocolError, match="reused"):
            codec.decode(codec.encode(Open(number=1, epoch=1, opening=opening)), hello)


def no_record(slot, position):
    """A record of the pending token alone, in a slot."""
    promotion = no_promotion(2, 2)
    promotion.position[slot] = position
    return promotion


def rounds(draft, position):
    """One that promotes and expands a record in slot 0."""
    asked_records(draft, no_record(0, position))
    asked_branches(draft, np.array([[1, 0, 0], [0, 0, 0]], np.int32), 1)


def kinds(link):
    return [type(message) for message in link.sent]


def test_a_worker_is_told_of_more_pages_before_the_round_that_writes_to_them():
    draft, links = remote()
    enter(draft, FIRST)
    rounds(draft, 9)
    draft.set_pages(0, (0, 1, 2, 3, 7))
    rounds(draft, 10)
    rounds(draft, 11)
    assert kinds(links[0]) == [Open, Prefill, *ROUND, MorePages, *ROUND, *ROUND]
    assert links[0].sent[4].pages == (0, 1, 2, 3, 7)


def test_a_worker_that_was_started_again_is_told_of_all_pages_at_once():
    draft, links = remote()
    enter(draft, FIRST)
    links[0].close()
    draft.set_pages(0, (0, 1, 2, 3, 7))
    rounds(draft, 9)
    assert kinds(links[1]) == [Open, Prefill, *ROUND]
    assert tuple(links[1].sent[0].opening.pages) == (0, 1, 2, 3, 7)


def test_a_text_that_goes_on_is_counted_once():
    """As committed: a worker that catches up would count it again else."""
    draft, links = remote()
    draft.open(dataclasses.replace(FIRST, prompt=6))
    draft.prefill(0, PROMPT, 0)
    rounds(draft, 9)
    opened, _, asked, _ = links[0].sent
    assert opened.opening.prompt == ALL
    assert asked.committed[0].tolist() == PROMPT[6:]


def test_pages_of_another_request_or_of_no_stock_are_not_taken():
    session = DraftSession(HELLO, Devices, lambda: False)
    devices = Devices()
    session._make_draft = lambda: devices
    opened = Open(number=1, epoch=2, opening=FIRST)
    late = MorePages(number=2, slot=0, epoch=1, pages=(4,))
    right = MorePages(number=3, slot=0, epoch=2, pages=(0, 1, 2, 3, 7))
    for message in (HELLO, opened, late, right):
        list(session.handle(message))
    assert devices.pages == [(0, (0, 1, 2, 3, 7))]
    assert session.counters["stale"] == 1
    alone = msgspec.structs.replace(HELLO, page_size=0, pages=0)
    for pages, hello in (((16,), HELLO), ((), HELLO), (tuple(range(16)) * 2, HELLO), ((), alone)):
        with pytest.raises(ProtocolError, match="page"):
            codec.decode(codec.encode(msgspec.structs.replace(right, pages=pages)), hello)


class Devices:
    """A draft on other devices of this process."""

    slots, k, branches, nodes = 2, 2, 4, 0
    done = True

    def __init__(self):
        self.opened, self.prefilled, self.pages = [], [], []

    def open(self, opening):
        self.opened.append(opening)

    def prefill(self, slot, tokens, offset):
        self.prefilled.append((slot, offset, len(tokens)))

    def set_pages(self, slot, pages):
        self.pages.append((slot, pages))

    def ready(self):
        return self.done


@pytest.mark.parametrize("late", [False, True])
def test_devices_that_are_late_were_not_given_the_pages(late):
    devices = Devices()
    draft = SubmeshDraft(devices, lambda x: x, support=1, tokens=128, page_size=SIZE)
    draft._overdue, devices.done = devices if late else None, not late
    enter(draft, FIRST)
    devices.done = True
    enter(draft, SECOND)
    assert devices.opened[-1].reused == (0 if late else 2 * SIZE)
    assert devices.prefilled == ([] if late else [(0, 0, 10)]) + [(1, 0, 10)]
